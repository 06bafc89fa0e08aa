"""What a server reports of its troubles: text that is safe to show, and each kind once a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable

AGAIN_SECONDS = 60.0


def printable(text: str, most: int = 2000) -> str:
    """Of one line: control characters, and bytes that are no UTF-8, as escapes."""
    shown = text if len(text) <= most else f"{text[:most]}..."
    return "".join(each if each.isprintable() else _escaped(each) for each in shown)


def _escaped(character: str) -> str:
    if 0xDC80 <= ord(character) <= 0xDCFF:  # a byte of a name, by os.fsdecode
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


class OnceAMinute(logging.Filter):
    """Lets a kind of record through once in `AGAIN_SECONDS`, with how many came in between.

    A kind is a line of the code that logs it. Any thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._last: dict[Hashable, tuple[float, int]] = {}

    def held(self, kind: Hashable) -> int | None:
        """How many of that kind came since one was let through; None: this one is held too."""
        now = time.monotonic()
        with self._lock:
            said, held = self._last.get(kind, (float("-inf"), 0))
            if now - said < AGAIN_SECONDS:
                self._last[kind] = said, held + 1
                return None
            self._last[kind] = now, 0
        return held

    def filter(self, record: logging.LogRecord) -> bool:
        held = self.held((record.pathname, record.lineno))
        if held is None:
            return False
        record.msg, record.args = printable(record.getMessage()), None
        if held:
            record.msg += f" (and {held} more like it)"
        return True
