"""What steps ask of a disk: a reuse buffer replayed, neighbours merged, and a modelled device's ms.

The same for every method that reads: a step names what it wants, each a record of one size, and
where it stands.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.machine import RESULTS
from kvswap_torch.tuning.disk import DiskModel
from kvswap_torch.tuning.traffic import Merging, ReuseBuffer, read_sizes

LOCAL = RESULTS / "disk_local.json"  # by `python -m bench.quality.local_disk`


@dataclass(frozen=True)
class Want:
    """What one step of one layer and row attends.

    Parameters
    ----------
    names
        ``[records]`` int64, rising: by which a reuse buffer knows them.
    places
        ``[records]`` int64: where each stands, in records from the file's beginning.
    """

    names: np.ndarray
    places: np.ndarray


def replay(
    steps: Sequence[Want], pages: int, policy: str, merging: Merging
) -> tuple[list[list[int]], float]:
    """The reads of each step but the first, and the share of its records that were there."""
    buffer = ReuseBuffer(pages, policy)
    reads: list[list[int]] = []
    wanted = loaded = 0
    for number, step in enumerate(steps):
        loads = buffer.plan(step.names)
        if number > 0:
            places = step.places[np.searchsorted(step.names, loads)]
            reads.append(read_sizes(places, merging))
            wanted, loaded = wanted + len(step.names), loaded + len(loads)
    return reads, 1 - loaded / wanted if wanted else 0.0


@dataclass(frozen=True)
class Device:
    """As csrc/io/modelled_reader.cpp has them; a test reads the figures there."""

    latency_s: float
    bytes_per_s: float
    depth: int

    def seconds(self, sizes: Sequence[int]) -> float:
        """From submitting these reads together, to an idle device, until all are there."""
        free_at, bus = [0.0] * self.depth, 0.0
        for size in sizes:
            bus = max(heapq.heappop(free_at) + self.latency_s, bus) + size / self.bytes_per_s
            heapq.heappush(free_at, bus)
        return bus


DEVICES = {"ufs": Device(270e-6, 2.9e9, 32), "emmc": Device(200e-6, 250e6, 2)}


def local_disk() -> DiskModel | None:
    """The disk that results were measured on; None where nobody measured one."""
    if not LOCAL.exists():
        return None
    return DiskModel.from_json(json.loads(LOCAL.read_text(encoding="utf-8"))["model"])


class DiskUse:
    """Sums over the steps of several samples, layers and rows."""

    def __init__(self, layers: int):
        self._layers = layers
        self._steps = 0  # of a layer
        self._requests = self._bytes = 0
        self._seconds = dict.fromkeys(("local", *DEVICES), 0.0)
        self._local = local_disk()

    def add(self, reads: Sequence[Sequence[Sequence[int]]]) -> None:
        """Of one sample and layer: reads by row, then step; rows of a step are read together."""
        for of_rows in zip(*reads, strict=True):
            sizes = [size for row in of_rows for size in row]
            self._steps += 1
            self._requests += len(sizes)
            self._bytes += sum(sizes)
            for name, device in DEVICES.items():
                self._seconds[name] += device.seconds(sizes)
            if self._local is not None and sizes:
                self._seconds["local"] += self._local.seconds(len(sizes), sum(sizes) / len(sizes))

    def as_dict(self) -> dict[str, Any] | None:
        """Of a token: requests, bytes, and ms by device, its layers one after another."""
        if not self._steps:
            return None
        each = self._layers / self._steps
        ms = {name: round(1e3 * each * sum_, 3) for name, sum_ in self._seconds.items()}
        if self._local is None:
            del ms["local"]
        return {
            "requests": round(each * self._requests, 2),
            "bytes": round(each * self._bytes),
            "ms": ms,
        }
