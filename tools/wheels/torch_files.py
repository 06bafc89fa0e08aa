"""Headers and link libraries of the torch that wheels are built for: the one that is pinned.

What is built for 2.13 loads with 2.14 and 2.15, which have all symbols that it needs; what is built
for 2.11 does not load with 2.13, where five are gone. So a wheel asks for the pinned release or a
newer one, and older ones build from source. The environment's own torch is taken where it is that
release for the wanted processor; else an index's wheel is fetched. For a wheel with CUDA it always
is: the index's torch has CUDA.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LINKED = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libc10_cuda.so")


class NotToBeHad(Exception):
    """Something that a wheel needs cannot be fetched; says what and why."""


def pinned(root: Path) -> str:
    """The release in constraints.txt."""
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    (found,) = re.findall(r"^torch==([\d.]+)$", text, re.MULTILINE)
    return found


def cuda_label(torch: Path) -> str:
    """``cu130`` of a torch with CUDA 13.0, as torch's own versions say it.

    Raises
    ------
    NotToBeHad
        That torch has no CUDA.
    """
    told = (torch / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*= '(\d+)\.(\d+)'", told, re.MULTILINE)
    if found is None:
        raise NotToBeHad("--cuda: needs a torch with CUDA, and the index's has none")
    return f"cu{found[1]}{found[2]}"


def _installed(release: str, architecture: str) -> Path | None:
    """The running environment's torch, if it will do; imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or architecture != os.uname().machine:
        return None
    version = importlib.metadata.version("torch").split("+")[0]
    return Path(spec.origin).parent if version == release else None


def folder(release: str, architecture: str, downloads: Path, cuda: bool = False) -> Path:
    """The package's folder with ``include``, ``lib`` and ``version.py``, fetched if need be.

    With `cuda` the index's torch, never one of this environment.

    Raises
    ------
    NotToBeHad
        pip does not bring it.
    """
    if not cuda and (here := _installed(release, architecture)) is not None:
        return here
    done = downloads / f"torch-{release}-{architecture}"
    needed = "libc10_cuda.so" if cuda else "libc10.so"
    if (done / "torch" / "lib" / needed).is_file():
        return done / "torch"
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as name:
        print(f"wheels: fetching torch {release} for {architecture} (530 MB, once)", flush=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--dest", name]
        command += ["--python-version", "3.11", "--platform", f"manylinux_2_28_{architecture}"]
        # Three signs of equality: 2.13.0+cpu, which may lie on this machine, is another one.
        told = subprocess.run([*command, f"torch==={release}"], capture_output=True, text=True)
        wheels = list(Path(name).glob("*.whl"))
        if told.returncode or not wheels:
            errors = [line for line in told.stderr.splitlines() if line.startswith("ERROR")]
            raise NotToBeHad(
                f"torch {release} for {architecture}: "
                + (errors[-1] if errors else f"pip ended with {told.returncode}")
            )
        _unpack(wheels[0], Path(name) / "unpacked")
        shutil.rmtree(done, ignore_errors=True)  # an earlier one, without what is needed now
        (Path(name) / "unpacked").rename(done)
    return done / "torch"


def _unpack(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            linked = name.startswith("torch/lib/") and name.rsplit("/", 1)[-1] in LINKED
            if name.startswith("torch/include/") or linked or name == "torch/version.py":
                packed.extract(name, to)
