"""Progress of long work, as lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)."""

EVERY_S = 30.0


class Lines:
    """Progress in plain lines, for logs and pipes: one a stage, and one every half minute.

    A context manager: inside it a thread reports the progress of a long piece of work. Called
    as `tuning` calls its progress, from one thread.

    Parameters
    ----------
    write
        Takes a line.
    every_s
        Seconds between two lines of one stage.
    """

    def __init__(self, write: Callable[[str], None], every_s: float = EVERY_S):
        self._write = write
        self._every_s = every_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._what = ""
        self._done, self._total = 0, 0
        self._began = self._told = 0.0
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if what != self._what:
                self._what, self._began, self._told = what, now, now
                self._write(f"{what} ...")
            ended = done == total and self._done < total
            self._done, self._total = done, total
            if ended:
                self._write(f"{what}: done, {shown(now - self._began)}")

    def _repeat(self) -> None:
        while not self._ended.wait(min(1.0, self._every_s)):
            with self._lock:
                now = time.monotonic()
                if self._done < self._total and now - self._told >= self._every_s:
                    self._told = now
                    self._write(self._state(now))

    def _state(self, now: float) -> str:
        state = f"{self._what}: {self._done} of {self._total}"
        if self._done == 0:
            return f"{state}, {shown(now - self._began)} so far"
        left = (now - self._began) / self._done * (self._total - self._done)
        return f"{state}, about {shown(left)} left"


def shown(seconds: float) -> str:
    """Like ``40 s`` or ``12 min``."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
