"""A text file that is replaced at once: a reader finds the old one or the new one whole."""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Of one writer at a time. A run that is killed leaves the old file, and a half-written one.

    Raises
    ------
    OSError
        The folder is not writable, or its disk is full.
    """
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
