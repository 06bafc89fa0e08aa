"""Checkpoints that survive a kill, a full disk and a damaged file."""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

NAME = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
_MAGIC = b"KVREF001"
_DIGEST_BYTES = 32


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there.

    Raises
    ------
    CheckpointError
        When the disk refuses; what was at `path` before is untouched.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"write: {path} ({len(data)} bytes) could not be written: {error.strerror};"
            " the earlier file is untouched; free some space and run again with --resume"
        ) from error


def pack_checkpoint(state: dict[str, Any]) -> bytes:
    """The state as the bytes of a checkpoint file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    body = buffer.getvalue()
    return _MAGIC + hashlib.sha256(body).digest() + body


def save_checkpoint(folder: Path, packed: bytes) -> None:
    """Write a packed state; the checkpoint before stays as `checkpoint.previous.pt`."""
    waiting = folder / "checkpoint.new.pt"
    write_atomic(waiting, packed)
    if (folder / NAME).exists():
        os.replace(folder / NAME, folder / PREVIOUS)
    os.replace(waiting, folder / NAME)


class CheckpointWriter:
    """Writes checkpoints beside the training: a busy disk may hold one up for a minute.

    One write at a time. An error of a write is raised by the next `save` or by `wait`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Begin to write the state as it is now."""
        packed = pack_checkpoint(state)
        self.wait()
        self._writing = self._executor.submit(save_checkpoint, self.folder, packed)

    def wait(self) -> None:
        """Return when the last state is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read one checkpoint.

    Raises
    ------
    CheckpointError
        When the file is cut short or changed, or holds objects that loading would have to run.
    """
    data = path.read_bytes()
    begin = len(_MAGIC) + _DIGEST_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        raise CheckpointError(f"read: {path} must begin with {_MAGIC!r}, got {data[:8]!r}")
    if hashlib.sha256(data[begin:]).digest() != data[len(_MAGIC) : begin]:
        raise CheckpointError(f"read: {path} is damaged: its checksum does not match its content")
    try:
        return torch.load(io.BytesIO(data[begin:]), map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError) as error:  # a whole file, but not of ours
        raise CheckpointError(
            f"read: {path} must hold tensors, numbers, text, lists and dicts alone, got more: "
            f"{str(error).splitlines()[0]}"
        ) from error


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the newest checkpoint that is whole.

    Returns
    -------
    tuple of dict and list of str
        The state, and what to tell the person about files that could not be used.

    Raises
    ------
    CheckpointError
        When there is none, or none is whole.
    """
    complaints: list[str] = []
    for name in (NAME, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            return read_checkpoint(path), complaints
        except (CheckpointError, OSError) as error:
            complaints.append(f"{error}; trying the checkpoint before it")
    found = "; ".join(complaints) or "nothing there"
    raise CheckpointError(
        f"resume: {folder} must hold a whole checkpoint, got: {found};"
        " start anew without --resume, or from weights with --init-from FOLDER"
    )
