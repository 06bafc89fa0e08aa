"""Headers and link libraries of the torch that wheels are built for: the one that is pinned.

What is built for 2.13 loads with 2.14 and 2.15, which have all symbols that it needs; what is built
for 2.11 does not load with 2.13, where five are gone. So a wheel asks for the pinned release or a
newer one, and older ones build from source. The environment's own torch is taken where it is that
release for the wanted processor; else an index's wheel is fetched, of whose CUDA part nothing is
kept.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LINKED = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")


class NotToBeHad(Exception):
    """Something that a wheel needs cannot be fetched; says what and why."""


def pinned(root: Path) -> str:
    """The release in constraints.txt."""
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    (found,) = re.findall(r"^torch==([\d.]+)$", text, re.MULTILINE)
    return found


def _installed(release: str, architecture: str) -> Path | None:
    """The running environment's torch, if it will do; imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or architecture != os.uname().machine:
        return None
    version = importlib.metadata.version("torch").split("+")[0]
    return Path(spec.origin).parent if version == release else None


def folder(release: str, architecture: str, downloads: Path) -> Path:
    """The package's folder with ``include``, ``lib`` and ``version.py``, fetched if need be.

    Raises
    ------
    NotToBeHad
        pip does not bring it.
    """
    if (here := _installed(release, architecture)) is not None:
        return here
    done = downloads / f"torch-{release}-{architecture}"
    if done.is_dir():
        return done / "torch"
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as name:
        print(f"wheels: fetching torch {release} for {architecture} (530 MB, once)", flush=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--dest", name]
        command += ["--python-version", "3.11", "--platform", f"manylinux_2_28_{architecture}"]
        told = subprocess.run([*command, f"torch=={release}"], capture_output=True, text=True)
        wheels = list(Path(name).glob("*.whl"))
        if told.returncode or not wheels:
            errors = [line for line in told.stderr.splitlines() if line.startswith("ERROR")]
            raise NotToBeHad(
                f"torch {release} for {architecture}: "
                + (errors[-1] if errors else f"pip ended with {told.returncode}")
            )
        _unpack(wheels[0], Path(name) / "unpacked")
        (Path(name) / "unpacked").rename(done)
    return done / "torch"


def _unpack(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            linked = name.startswith("torch/lib/") and name.rsplit("/", 1)[-1] in LINKED
            if name.startswith("torch/include/") or linked or name == "torch/version.py":
                packed.extract(name, to)
