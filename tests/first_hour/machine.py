"""Where a reader types: on this machine, or on one of its own (`debian`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

# What this environment has of a clone, and of a make, is not to be found in the reader's.
HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")


class Machine(Protocol):
    """Runs a reader's commands.

    Attributes
    ----------
    name
        As results name it.
    left_out
        First words of commands that are not typed there.
    """

    name: str
    left_out: tuple[str, ...]

    def inside(self, path: Path) -> Path:
        """What a path of this machine is called there."""

    def command(self, script: str, folder: Path) -> list[str]:
        """A program and its arguments that run a line of shell in a folder, given as here."""

    def environment(self) -> dict[str, str]:
        """The variables of that program."""


class Host:
    """This machine as it is, with its packages."""

    name = "host"
    left_out = ("apt-get",)

    def inside(self, path: Path) -> Path:
        return path

    def command(self, script: str, folder: Path) -> list[str]:
        return ["bash", "-c", f'cd "$0" || exit; {script}', str(folder)]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in HIDDEN}
