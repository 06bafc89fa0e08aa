"""Files that come from elsewhere: opened only when regular, read only when small enough."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

CONFIG_BYTES_MAX = 4 << 20
HEADER_BYTES_MAX = 16 << 20


def read_start(path: str | Path, length_bytes: int, offset_bytes: int = 0) -> bytes:
    """At most so many bytes of a regular file.

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is a pipe, a device or the like, which could wait or go on for ever.
    """
    # Not to wait for the writer of a pipe of that name.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(21, "Is a directory", str(path))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"it is no regular file: {path}")
        file.seek(offset_bytes)
        return file.read(length_bytes)


def strict_json(text: str) -> Any:
    """JSON whose fields are given once, whose integers have 64 bits and whose numbers are finite.

    Strings are Unicode: half of a surrogate pair is no character.

    Raises
    ------
    ValueError
        For all else, values nested too deeply too.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_int=_int64,
        )
        check_characters(text, value)
        return value
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def check_characters(text: str, value: Any) -> None:
    """That no string of what the JSON `text` says has half of a surrogate pair.

    Raises
    ------
    ValueError
    """
    if "\\ud" not in text.lower():
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("strings must be Unicode, got half of a surrogate pair") from error


def check_safetensors(path: str | Path) -> None:
    """What safetensors itself takes, and the C++ reader does not.

    Raises
    ------
    OSError, ValueError
    """
    length = int.from_bytes(read_start(path, 8), "little")
    if length > HEADER_BYTES_MAX:
        raise ValueError(f"its header must be at most {HEADER_BYTES_MAX} bytes, got {length}")
    strict_json(read_start(path, length, 8).decode("utf-8"))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"a field must be given once, got {', '.join(twice)} again")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"numbers must be finite, got {name}")


def _int64(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else 1 << 64
    if not -(2**63) <= value < 2**63:
        raise ValueError("integers must have 64 bits, got a longer one")
    return value
