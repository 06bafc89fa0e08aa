"""What a command will write, checked before the work whose result it is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvswap_torch.errors import ConfigError
from kvswap_torch.saved_path import is_in_use, named

if TYPE_CHECKING:
    from kvswap_torch.config import SwapConfig


def check_file(option: str, path: Path) -> None:
    """That a file can be written there.

    Raises
    ------
    ConfigError
        It is a folder, its folder is missing, or it cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"{option}: must be a file, and {path} is a folder")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{option}: its folder must exist, got {path}")
    is_new = not os.path.lexists(path)
    if not is_new and not path.is_file():
        return  # a pipe, or a link to nothing: to try it would change it
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"{option}: must be a file that can be written, got {path}: {error.strerror}"
        ) from error


def check_directory(option: str, directory: Path | None) -> None:
    """That a session's file can be made there: before a model is loaded for it.

    Raises
    ------
    ConfigError
        It is missing, no directory, or not writable.
    """
    if directory is None:
        return
    what = None
    if not os.path.lexists(directory):
        what = "is not there; create it, or choose another path"
    elif not directory.is_dir():
        what = "is not one; choose another path"
    elif not os.access(directory, os.W_OK | os.X_OK):
        what = "cannot be written; choose another path"
    if what is not None:
        raise ConfigError(
            f"{option}: must be a directory on the disk to use, got {directory}, which {what}"
        )


def check_folder(option: str, folder: Path, overwrite: bool | None = None) -> None:
    """That a saved cache can be put there.

    Parameters
    ----------
    overwrite
        Whether a saved cache that is there is replaced; None: the command has no such option.

    Raises
    ------
    ConfigError
        The path is taken, or its parent is missing or takes no new folder.
    """
    target = named(folder)
    if os.path.lexists(target):
        if not overwrite:
            remedy = "" if overwrite is None else ", or give --overwrite"
            raise ConfigError(
                f"{option}: {folder} must not exist, and does; choose another path, remove it with "
                f"kvswap rm{remedy}"
            )
        is_saved = os.path.lexists(os.path.join(target, "manifest.json"))
        if os.path.islink(target) or not is_saved:
            raise ConfigError(
                f"{option}: {folder} must be the folder of a saved cache to be replaced, and is "
                "none; choose another path"
            )
        if is_in_use(Path(target)):
            raise ConfigError(
                f"{option}: {folder} must be open nowhere to be replaced, and somebody uses it; "
                "end that, or choose another path"
            )
    parent, name = os.path.split(os.path.abspath(target))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"{option}: its parent must be a folder that takes a new one, got {folder}: "
            f"{error.strerror}"
        ) from error


def check_settings(option: str, settings: SwapConfig, why: str) -> None:
    """That a cache of such settings can be saved.

    Parameters
    ----------
    why
        Who saves it.

    Raises
    ------
    ConfigError
        It cannot: it retains tokens by scores of a user's own.
    """
    if settings.retention is not None and settings.retention.POLICY == "user":
        raise ConfigError(
            f"{option}: retention.policy must not be user, whose scores cannot be saved; {why}"
        )
