"""Whether the server can answer, and what it takes of the machine."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.line import Line
from kvswap_torch.hf.serving.troubles import printable

FREE_BYTES_LEAST = 16 << 20  # of a disk that is not full
LOOK_SECONDS = 2.0  # for a disk to answer
AGAIN_SECONDS = 1.0  # between two looks


class Health:
    """Looks at the line, and at the folders in which records and caches are written.

    A disk that hangs hangs one thread, and is reported; looks are made on no more than that one.

    Parameters
    ----------
    folders
        By name: in each a file must be writable, as it is now.
    connections
        How many clients there are.
    """

    def __init__(
        self,
        line: Line,
        counts: Counts,
        folders: Mapping[str, Path],
        connections: Callable[[], int],
    ) -> None:
        self._line, self._counts, self._connections = line, counts, connections
        self._folders = {name: (folder, _trouble(folder) == "") for name, folder in folders.items()}
        self._look: asyncio.Future | None = None
        self._began = float("-inf")
        self._found: list[str] = []

    async def reasons(self) -> list[str]:
        """Why no request should be sent here now; empty: none."""
        disk = await self._disks()
        if self._line.is_closed:
            return ["the server ends", *disk]
        return (["as many requests wait as may (--queue)"] if self._line.is_full else []) + disk

    def measure(self) -> None:
        """Sets the gauges that are looked up when they are asked for."""
        self._counts.set("waiting", self._line.waiting)
        self._counts.set("running", self._line.running)
        self._counts.set("connections", self._connections())
        for name, value in of_process().items():
            self._counts.set(name, value)

    async def _disks(self) -> list[str]:
        now = time.monotonic()
        if self._look is None and now - self._began >= AGAIN_SECONDS:
            self._began = now
            self._look = asyncio.ensure_future(asyncio.to_thread(self._look_at_disks))
        if self._look is None:
            return self._found
        done, _ = await asyncio.wait({self._look}, timeout=LOOK_SECONDS)
        if not done:
            return [f"a disk has not answered for {time.monotonic() - self._began:.0f} s"]
        if self._look is not None:
            self._found, self._look = self._look.result(), None
        return self._found

    def _look_at_disks(self) -> list[str]:
        found = []
        for name, (folder, was_writable) in self._folders.items():
            trouble = _trouble(folder)
            if trouble and (was_writable or trouble not in _READ_ONLY):
                found.append(printable(f"{name}: {trouble}"))
        return found


_READ_ONLY = tuple(os.strerror(each) for each in (errno.EROFS, errno.EACCES, errno.EPERM))


def _trouble(folder: Path) -> str:
    """Why a file cannot be written there; empty: it can."""
    try:
        facts = os.statvfs(folder)
        if facts.f_bavail * facts.f_frsize < FREE_BYTES_LEAST:
            return f"less than {FREE_BYTES_LEAST >> 20} MiB are free"
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def of_process() -> dict[str, float]:
    """Memory and descriptors, by the gauges' names."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(os.listdir("/proc/self/fd")),
        "open_files_max": limit,
    }
