"""Where a saved cache is, by a path whose last part is its name."""

from __future__ import annotations

import os
from pathlib import Path


def named(path: str | Path) -> str:
    """`path`; the absolute one where it ends in ``.`` or ``..``, which name no folder.

    Raises
    ------
    ValueError
        It is not of UTF-8.
    """
    text = os.fsdecode(path)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"saved cache: path must be UTF-8, got {text!r}") from error
    is_nameless = os.path.basename(text.rstrip("/")) in (".", "..")
    return os.path.realpath(text) if is_nameless else text
