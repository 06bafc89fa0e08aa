"""Builds the source distribution as a user does: ``make wheels-check ARGS=--sdist``.

Isolation is off, as README says: unpacked, with this environment's torch and tools, or with
``--bare 3.12`` as the file that it is, in a new environment, into which pip brings them. Where
there is no compiler, pip must say so in one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from tests.packaging.check_wheel import PIP, make_environment, new_environment


def newest(dist: Path) -> Path:
    found = sorted(dist.glob("kvswap_torch-*.tar.gz"))
    if not found:
        sys.exit(f"wheels-check: {dist} must have a source distribution; run: make sdist")
    return found[-1].resolve()


def without_compiler(source: Path, folder: Path) -> str:
    """The one line with which pip ends where there is no compiler."""
    (folder / "tools").mkdir()
    for tool in ("cmake", "ninja"):  # there, and not run
        (folder / "tools" / tool).symlink_to("/bin/false")
    outside = ("CC", "CXX", "KVSWAP_CMAKE_ARGS")
    kept = {name: value for name, value in os.environ.items() if name not in outside}
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder / "none", source]
    done = subprocess.run(
        [sys.executable, *command], env=kept | {"PATH": str(folder / "tools")}, cwd=folder,
        text=True, capture_output=True,
    )  # fmt: skip
    told = done.stdout + done.stderr
    lines = [line.strip() for line in told.splitlines() if "kvswap_torch: " in line]
    if done.returncode == 0 or len(lines) != 1 or "a C++20 compiler" not in lines[0]:
        sys.exit(f"wheels-check: a build without a compiler must say so in one line, says\n{told}")
    return f"without a compiler: {lines[0]}"


def built(source: Path, version: str | None, folder: Path) -> tuple[Path, str]:
    """The Python of an environment in which it was built, and how long that took.

    With a `version` it is new and has what README names; else it borrows this one's packages.
    """
    if version is None:
        with tarfile.open(source) as packed:
            packed.extractall(folder, filter="data")
        unpacked = folder / source.name.removesuffix(".tar.gz")
        # Where a clone has it: the compiler's cache then has what a clone compiled with this torch.
        (unpacked / ".venv").symlink_to(sys.prefix)
        begin = time.monotonic()
        python = make_environment(
            folder / "env", unpacked, "--no-build-isolation", pip_of=unpacked / ".venv/bin/python"
        )
    else:
        python = new_environment(version, folder)
        tools = ["torch", "setuptools>=77", "cmake", "ninja"]
        subprocess.run([python, *PIP, "install", "-q", *tools], check=True)
        path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        begin = time.monotonic()
        subprocess.run([python, *PIP, "install", "-q", "--no-build-isolation", source],
                       env=os.environ | path, check=True)  # fmt: skip
    minutes = (time.monotonic() - begin) / 60
    return python, f"{source.name}: built and installed in {minutes:.1f} minutes"
