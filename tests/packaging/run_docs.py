"""Runs the shell blocks of README, CONTRIBUTING and docs/ in a fresh clone, as a newcomer would.

    python -m tests.packaging.run_docs [--into FOLDER]

The clone sets itself up from nothing, so this takes minutes and needs the package index. `NEVER`
and `OWN_MODEL` have what is left out, with the reason; what several pages say is run once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# First words of a command -> why it is left out even in a fresh clone.
NEVER = {
    "make test-aarch64": "an emulator, hours",
    "make test": "runs in CI beside this",
    "make cuda-compile": "runs in CI beside this",
    "make first-hour": "new environments, gigabytes; minutes",
    "make golden": "minutes; test_golden.py compares in CI",
    "make gpu-check": "needs a GPU",
    "make gpu-prebuilt": "fetches 530 MB; needs nvcc and the headers of another Python",
    "make oldest-torch": "runs in CI beside this",
    "make version-matrix": "hours; test_version_matrix.py holds what it found",
    "make other-sums": "runs in CI beside this",
    "make wheels": "minutes a Python",
    "make release": "sets a tag; test_public_files.py tries it on a repository of its own",
    "make sanitize": "runs in CI beside this",
    "make faults": "minutes each, and the soak an hour",
}
# The same, of commands that `tests/python/docs_reader.py` types with a small model.
OWN_MODEL = {
    "kvswap generate --model DIR": "needs a model of the reader's own",
    "torchrun": "needs a model of the reader's own",
    "python -m examples.batch": "needs a model of the reader's own",
    "kvswap serve --model DIR": "needs a model of the reader's own",
    "kvswap tune --model DIR": "needs a model of the reader's own",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[1], found[2])
        for found in FENCE.finditer(text)
    ]


def readme_program() -> str:
    """The Python that README prints, to be run in the clone's folder."""
    (program,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    return program


def commands(block: Block) -> list[str]:
    """The block's commands: continued lines and those of quoted JSON joined, comments left out."""
    joined = re.sub(r"\\\n\s*", "", block.text)
    joined = re.sub(r"'\{[^']*'", lambda quoted: quoted[0].replace("\n", " "), joined)
    lines = (re.sub(r"\s+# .*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def scripts(folder: Path, python: str = sys.executable) -> Path:
    """A folder with the commands that an installed package has, run by `python`."""
    for name, module in (("kvswap", "kvswap_torch"), ("kvswap-tune", "kvswap_torch.tuning")):
        write_script(folder / name, f'exec {python} -m {module} "$@"')
    write_script(folder / "python", f'exec {python} "$@"')
    return folder


def write_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


def run_block(block: Block, root: Path, path: Path, left_out: Mapping[str, str]) -> list[str]:
    """Runs the block's commands in `root`, with the programs of `path` first; those that ran.

    Commands that begin as a key of `left_out` are not run.

    Raises
    ------
    RuntimeError
        With the command and all it wrote, when one fails.
    """
    (root / "build").mkdir(exist_ok=True)
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    ran = [command for command in commands(block) if not command.startswith(tuple(left_out))]
    for command in ran:
        done = subprocess.run(
            ["bash", "-c", command], cwd=root, env=environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{block.name}: {command}\n{done.stdout}")
    return ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="an empty folder; default: a temporary one")
    into = parser.parse_args().into
    with tempfile.TemporaryDirectory(prefix="kvswap-docs-") as temporary:
        clone = (into or Path(temporary)) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        # What every page supposes: the environment in .venv, the libraries built.
        subprocess.run(["make", "-s", "build"], cwd=clone, check=True)
        left_out = NEVER | OWN_MODEL
        for page in PAGES:
            for block in blocks(clone / page.relative_to(ROOT)):
                if block.language == "sh":
                    ran = run_block(block, clone, clone / ".venv" / "bin", left_out)
                    left_out |= dict.fromkeys(ran, "has been run")
                    print(f"{block.name}: ran {ran} of {commands(block)}", flush=True)


if __name__ == "__main__":
    main()
