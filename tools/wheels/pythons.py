"""Where the headers of each Python are that a wheel is built for.

An interpreter with its headers on PATH (``python3.12``) or below ~/.pyenv, else Debian's package of
the headers. 64-bit Linux has the same headers on every processor, as far as a module can see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.wheels.torch_files import NotToBeHad

ASK = "import sysconfig; print(sysconfig.get_path('include'))"


def interpreters(version: str) -> Iterator[str]:
    """Those of this machine that may be of that version."""
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = home.glob(f"versions/{version}.*/bin/python{version}")
    yield from map(str, sorted(found, reverse=True))


def headers(version: str, root: Path, downloads: Path) -> Path:
    """The folder of Python.h for ``3.12``.

    Raises
    ------
    NotToBeHad
        No interpreter here has them, and no package.
    """
    for interpreter in interpreters(version):
        told = subprocess.run([interpreter, "-c", ASK], capture_output=True, text=True)
        found = Path(told.stdout.strip() or "/nowhere")
        if told.returncode == 0 and (found / "Python.h").is_file():
            return found
    folder = downloads / f"python-{version}"
    command = [str(root / ".ci" / "python-headers"), version, str(folder)]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise NotToBeHad(
            f"headers of Python {version}: no python{version} on PATH or below ~/.pyenv has them, "
            f"and {(told.stderr.strip().splitlines() or ['apt failed'])[-1]}"
        )
    return folder


def module_suffix(version: str, architecture: str) -> str:
    """What the module's file is called after its name."""
    return f".cpython-{version.replace('.', '')}-{architecture}-linux-gnu.so"
