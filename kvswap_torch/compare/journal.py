"""Results as they come, one line for each document and method, so that a run can go on later."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FORMAT = 3  # raised when older lines must not be mixed with newer ones
FITTING = 2  # raised when more may fit than before: what did not is tried again


class Journal:
    """A JSONL file; lines of one setting only.

    Parameters
    ----------
    path
        Created when it is not there.
    key
        Fields that name a line: a later one of the same names takes an earlier one's place.
    """

    def __init__(self, path: Path, key: Sequence[str] = ("length", "document", "method")):
        self.path = path
        self._fields = tuple(key)
        self._lines: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                line = _parse(text)
                if line is not None:
                    self._lines[self._key(line)] = line

    def has(self, *key: Any) -> bool:
        """Whether nothing is left to do for a line of that name."""
        line = self._lines.get(key)
        if line is None:
            return False
        return "impossible" not in line or line.get("fitting") == FITTING

    def add(self, line: dict[str, Any]) -> None:
        """Appends a line; on disk when this returns."""
        if "impossible" in line:
            line = line | {"fitting": FITTING}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            if self._is_cut_short():
                file.write("\n")
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._lines[self._key(line)] = line

    def _is_cut_short(self) -> bool:
        """Whether a run was killed in the middle of a line."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                return False
            file.seek(size - 1)
            return file.read(1) != b"\n"

    def lines(self) -> list[dict[str, Any]]:
        """All of them, sorted by what names them."""
        return [self._lines[key] for key in sorted(self._lines)]

    def _key(self, line: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(line[field] for field in self._fields)


def _parse(text: str) -> dict[str, Any] | None:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None  # the last line of a run that was killed; it is measured again


def digest_of(files: Iterable[Path], settings: dict[str, Any]) -> str:
    """Twelve digits that change with the weights, the config or what is asked."""
    digest = hashlib.sha256(json.dumps({"format": FORMAT} | settings, sort_keys=True).encode())
    for path in sorted(files):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
