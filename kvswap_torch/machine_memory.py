"""How much memory this process may have: the machine's, and what limits are set below that."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

# Of a version of cgroups: the file with its limit, bytes or "max".
CGROUP_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
PROC = Path("/proc")


@dataclass(frozen=True)
class MemoryLimit:
    """The most that this process may have.

    Parameters
    ----------
    limit_bytes, what
        The lowest of all limits, and which one it is.
    available_bytes
        What the kernel could give now without taking it from another process.
    swap_bytes
        Swap of this machine, where its RAM is the limit: others are not widened by it.
    """

    limit_bytes: int
    what: str
    available_bytes: int
    swap_bytes: int = 0


def memory_limit(proc: Path = PROC) -> MemoryLimit:
    """RAM, the cgroup's limit and that of every group above it, and RLIMIT_DATA; the lowest."""
    told = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(told[each].split()[0]) << 10 for each in ("MemTotal", "MemAvailable"))
    limits = {total: "this machine's RAM"}
    if (of_group := _cgroup_limit(proc)) is not None:
        limits.setdefault(of_group, "the cgroup's limit")
    data = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if data != resource.RLIM_INFINITY:
        limits.setdefault(data, "RLIMIT_DATA")
    least = min(limits)
    swap = int(told.get("SwapTotal", "0").split()[0]) << 10 if least == total else 0
    return MemoryLimit(least, limits[least], available, swap)


def _cgroup_limit(proc: Path) -> int | None:
    """The lowest of this process's memory cgroup and those above; None where none is limited."""
    found = []
    for version, mount, group in _cgroups(proc):
        places = [mount / group, *(mount / above for above in Path(group).parents)]
        for place in places:
            try:
                text = (place / CGROUP_FILES[version]).read_text().strip()
            except OSError:
                continue  # the root has none, and a container sees no group above its own
            if text != "max":
                found.append(int(text))
    return min(found, default=None)


def _cgroups(proc: Path) -> list[tuple[int, Path, str]]:
    """Version, where it is mounted, and the process's group below that."""
    mounts = [line.split() for line in (proc / "self/mounts").read_text().splitlines()]
    found = []
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        for _, mount, kind, options, *_ in mounts:
            is_first = kind == "cgroup" and "memory" in controllers.split(",")
            if is_first and "memory" in options.split(","):
                found.append((1, Path(mount), group.lstrip("/")))
            if kind == "cgroup2" and controllers == "":
                found.append((2, Path(mount), group.lstrip("/")))
    return found
