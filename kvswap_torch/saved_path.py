"""Paths as the library takes them: text of UTF-8, and a saved cache's by its name."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kvswap_torch.errors import ConfigError


def text_of(path: str | Path, what: str = "path") -> str:
    """`path` as text.

    Raises
    ------
    ConfigError
        It is not of UTF-8; names `what`.
    """
    text = os.fsdecode(path)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what}: must be UTF-8, got {text!r}") from error
    return text


def named(path: str | Path) -> str:
    """`path`; the absolute one where it ends in ``.`` or ``..``, which name no folder.

    Raises
    ------
    ConfigError
        It is not of UTF-8.
    """
    text = text_of(path, "saved cache's path")
    is_nameless = os.path.basename(text.rstrip("/")) in (".", "..")
    return os.path.realpath(text) if is_nameless else text


def is_in_use(path: Path) -> bool:
    """Whether somebody has the saved cache open, asked without the patience of removing it."""
    # Not to wait for the writer of a pipe of that name.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        records = os.open(path / "records.bin", flags)
    except OSError:
        return False
    try:
        if stat.S_ISREG(os.fstat(records).st_mode):
            fcntl.flock(records, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(records)
    return False
