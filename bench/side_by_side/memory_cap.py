"""A memory cgroup below our own, so that a peer's page cache can be limited; version 1 or 2."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NONE = "no memory cap: no memory cgroup is writable here; run as root or delegate one"
LEAVING_SECONDS = 5.0
FILES = {  # of a version: limit and highest use so far, bytes
    1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.peak"),
}


def _places() -> Iterator[tuple[int, Path]]:
    """Folders that a memory cgroup could be made in: below our own cgroup, beside it, the root."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for _, mount, kind, options, *_ in mounts:
            version = 0
            if kind == "cgroup" and "memory" in controllers.split(","):
                version = 1 if "memory" in options.split(",") else 0
            if kind == "cgroup2" and controllers == "":
                version = 2
            if version:
                own = Path(mount) / path.lstrip("/")
                yield from ((version, place) for place in (own, own.parent, Path(mount)))


@dataclass
class MemoryCap:
    """One cgroup; gone after `close`, which its processes must have ended before.

    What a process had allocated before it came in is not counted.
    """

    folder: Path
    version: int

    @classmethod
    def open(cls) -> MemoryCap | None:
        """None where no cgroup can be made that limits memory."""
        for version, place in _places():
            folder = place / f"kvswap-bench-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            if (folder / FILES[version][0]).exists():
                return cls(folder, version)
            folder.rmdir()
        return None

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def limit(self, nbytes: int) -> None:
        (self.folder / FILES[self.version][0]).write_text(str(nbytes))

    def forget_peak(self) -> None:
        """Version 2 cannot, so that its peak is of all that was."""
        if self.version == 1:
            (self.folder / FILES[1][1]).write_text("0")

    def peak_bytes(self) -> int:
        """The most anonymous memory and page cache since `forget_peak`."""
        return int((self.folder / FILES[self.version][1]).read_text())

    def close(self) -> None:
        deadline = time.monotonic() + LEAVING_SECONDS
        while True:
            try:
                return self.folder.rmdir()
            except OSError:
                # A process that has just ended may still be counted.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
