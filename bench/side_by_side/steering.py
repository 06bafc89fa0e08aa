"""The parent's side of a child: start it, say a word, read its answer, look at its memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

from bench import machine
from bench.side_by_side.child import Order
from bench.side_by_side.memory_cap import MemoryCap

CLOSE_SECONDS = 60


class ChildError(RuntimeError):
    """A child could not do what it was told, or is gone."""


class Child:
    """One contender's process; it begins to import what it needs at once.

    Only one child works at a time; the others wait for their input, and their threads sleep
    instead of spinning, so that they take nothing from the one that is measured.
    """

    def __init__(self, order: Order, cap: MemoryCap | None = None):
        self.order, self.cap = order, cap
        cores = str(len(os.sched_getaffinity(0)))
        environment = os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": cores}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.side_by_side.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        # It has done nothing until it gets its order, so that all it takes counts for the cap.
        if cap is not None:
            cap.add(self.pid)
        self._process.stdin.write(order.line())
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, word: str) -> dict[str, Any]:
        """Raises `ChildError` with the child's own words, or with how it ended."""
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            told = "killed, memory may have run out" if status == -9 else f"exit status {status}"
            raise ChildError(f"{word}: the child ended ({told})")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{word}: {answer['error']}")
        return answer

    def memory_bytes(self) -> int:
        """Anonymous and shared memory now, as the kernel counts it; no pages of files."""
        return machine.memory_bytes(("RssAnon", "RssShmem"), self.pid)

    def close(self) -> None:
        """Ends it, whatever state it is in. Again does nothing."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self.cap is not None:
            self.cap.close()
            self.cap = None
