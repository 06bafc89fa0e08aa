"""Reads saved caches whole, moves damaged ones aside: `kvswap verify`, or a server at idle.

Needs no model, and changes nothing of what is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvswap_torch.errors import ConfigError, KVSwapError, StorageError
from kvswap_torch.failures import Failure, failure_of
from kvswap_torch.saved_path import is_in_use, named

DAMAGED = ".damaged"  # ends the name of a folder that was moved aside


@dataclass(frozen=True)
class Checked:
    """What `check` found.

    Parameters
    ----------
    tokens
        Of each sequence, where all of it is whole.
    failure, error
        What is wrong with it, or with reading it; None: nothing.
    moved_to
        Where it stands now, if it was moved aside.
    """

    path: Path
    tokens: int | None = None
    failure: Failure | None = None
    error: str = ""
    moved_to: Path | None = None

    @property
    def is_damaged(self) -> bool:
        return self.failure == "damage"


def read_whole(path: str | Path) -> int:
    """Reads every byte of a saved cache and checks it; how many tokens each sequence has.

    Raises
    ------
    CorruptionError
        A byte is not the one that was written.
    StorageError
        It cannot be read.
    ConfigError
        It is a newer version's, or was saved without checksums of its records.
    """
    from kvswap_torch import _C

    folder = _C.SavedCache(named(path))
    folder.verify()
    if not _has_checksums(json.loads(folder.manifest)):
        raise ConfigError(
            f"verify: {path} must have checksums of its records to be checked, and was made with "
            "storage.verify_checksums=false; its manifest and its state are whole"
        )
    return folder.tokens


def _has_checksums(manifest: dict[str, Any]) -> bool:
    settings = manifest["settings"]
    if manifest["kvswap_cache"] == 1:  # flat settings
        return bool(settings["checksum"])
    return bool(settings["storage"]["verify_checksums"])


def check(path: str | Path, move: bool = False) -> Checked:
    """`read_whole` without an exception; with `move` a damaged one gets the name ``*.damaged``.

    What somebody has open, or cannot be renamed, stays where it is.
    """
    path = Path(path)
    try:
        return Checked(path, read_whole(path))
    except KVSwapError as error:
        failure, text = failure_of(error), str(error)
    moved = None
    if failure == "damage" and move and not is_in_use(path):
        try:
            moved = move_aside(path)
        except StorageError as error:
            text += f"; {error}"
    return Checked(path, None, failure, text, moved)


def check_all(store: str | Path, move: bool = False) -> Iterator[Checked]:
    """Each saved cache in a folder, by name; what was moved aside before is left out.

    Raises
    ------
    StorageError
        The folder cannot be read.
    """
    try:
        places = sorted(os.scandir(store), key=lambda place: place.name)
    except OSError as error:
        raise StorageError(
            error.errno, f"verify: --store must be a folder, got {error.strerror}", str(store)
        ) from error
    for place in places:
        is_ours = not place.name.startswith(".") and DAMAGED not in place.name
        if is_ours and place.is_dir(follow_symlinks=False):
            yield check(place.path, move)


def move_aside(path: Path) -> Path:
    """Renames a folder to ``*.damaged``, or with a number behind it where that is taken.

    Raises
    ------
    StorageError
        It cannot be renamed.
    """
    target, number = path.with_name(path.name + DAMAGED), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}{DAMAGED}-{number}")
    try:
        path.rename(target)
    except OSError as error:
        raise StorageError(
            error.errno, f"verify: {path} must be movable, got {error.strerror}", str(path)
        ) from error
    return target
