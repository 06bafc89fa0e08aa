"""A user without a wheel: the sources, and README's command that builds them and asks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.first_hour.typist import Typist, WentWrongError
from tests.first_hour.users import Given
from tests.packaging.run_docs import NEVER, ROOT, blocks, commands

PAGE = "../quick-start"


def clone(folder: Path, given: Given) -> Typist:
    """What is committed in this tree, cloned as Quick start says; then README's commands."""
    origin = folder / "origin.git"
    subprocess.run(["git", "clone", "-q", "--bare", ROOT, origin], check=True)
    words = {"git clone URL": f"git clone file://{given.machine.inside(origin)}"}
    reader = Typist(PAGE, folder, words, given.machine)
    for command in [*reader.unread(), *readme_commands()]:
        reader.type(command)
    told = json.loads((folder / "kvswap_torch" / "build" / "demo.json").read_text("utf-8"))
    wrong = [asked["question"] for asked in told["questions"] if not asked["right"][0]]
    if wrong or not told["questions"] or not told["is_same"]:
        raise WentWrongError(f"make demo: must answer all from disk, has wrong: {wrong}")
    return reader


def readme_commands() -> list[str]:
    """README's two commands, without the one that takes hours."""
    (block,) = (block for block in blocks(ROOT / "README.md") if "make demo  " in block.text)
    return [command for command in commands(block) if not command.startswith(tuple(NEVER))]
