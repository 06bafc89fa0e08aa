"""The process's own memory: what the kernel counts, and giving back what is free.

A session's ledger counts what a cache keeps. The process has more: the model, and memory that was
freed and that the C library keeps for the next allocation. After a long forward pass that is
hundreds of MiB.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
FIELDS = ("VmRSS", "RssAnon", "VmHWM")
COST_SHARE_MAX = 0.01  # of the work that giving back ends
COST_FIRST = 0.005  # seconds, before any was measured
# oneDNN keeps the code that it made for products of each shape, and torch a second list of it:
# 1,024 each, of some 0.2 MiB. Each length of a prompt has shapes of its own, a few.
CODE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of this process, as the kernel counts them.

    Parameters
    ----------
    rss
        In memory now, the mapped pages of files included.
    anonymous
        Of that what no file backs: tensors, heaps, stacks.
    peak
        The most `rss` so far; of ``stats().process``, since the cache was opened. Where the process
        had more before, that is the most seen at the end of a long forward pass.
    """

    rss: int
    anonymous: int
    peak: int


def process_memory() -> ProcessMemory:
    """What this process has now, and had at most."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    found = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[0][:-1] in FIELDS}
    return ProcessMemory(*(found[name] for name in FIELDS))


def give_back_memory() -> bool:
    """Gives memory that is free back to the system: after a prompt was read, or a request.

    It takes milliseconds, more where more is free: not for each step of an answer.

    Returns
    -------
    bool
        Whether any was given back; False where the C library has no such call, too.
    """
    trim = _malloc_trim()
    return trim is not None and trim(0) != 0


def keep_little_code() -> None:
    """For a process that reads prompts of many lengths: oneDNN keeps code for few shapes.

    Before the first product of matrices. What the environment says already holds.
    """
    for name, most in CODE_CACHES.items():
        os.environ.setdefault(name, most)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other C libraries have none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


class MemoryReturns:
    """Of one cache: gives memory back after long forward passes, and remembers the most.

    The next time costs about what the last one did. It comes when work of a hundred times as long
    has been done, so that it never costs more than `COST_SHARE_MAX`.
    """

    def __init__(self) -> None:
        self._before = process_memory()
        self._most = self._before.rss
        self._work_seconds = 0.0
        self._cost_seconds = COST_FIRST

    def after(self, work_seconds: float) -> bool:
        """A long pass took so long. Returns whether memory was given back."""
        self._work_seconds += work_seconds
        if self._work_seconds * COST_SHARE_MAX < self._cost_seconds:
            return False
        self._most = max(self._most, process_memory().rss)
        began = time.perf_counter()
        give_back_memory()
        self._cost_seconds = time.perf_counter() - began
        self._work_seconds = 0.0
        return True

    def memory(self) -> ProcessMemory:
        """Now, with the most since this was made."""
        now = process_memory()
        self._most = max(self._most, now.rss)
        has_risen = now.peak > self._before.peak
        return ProcessMemory(now.rss, now.anonymous, now.peak if has_risen else self._most)
