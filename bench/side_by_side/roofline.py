"""How fast a step could be at most: bytes from memory and from the disk over measured bandwidth."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.contenders import SELECTED_TOKENS
from bench.side_by_side.plan import FLOORS, LLAMA, WEIGHTS, Cell, is_on_session
from bench.side_by_side.weights import touched_bytes

BUFFER_BYTES = 1 << 30
ROUNDS = 5
SCRATCH_BYTES = 1 << 30
READ_DEPTH = 64
READ_SECONDS = 0.2
LARGE_READ_BYTES = 1 << 20
KEPT_TOKENS = 36  # sinks and tail


def memory_bytes_per_second() -> float:
    """Of reading, with all cores: the best of a few sums over a gibibyte."""
    data = torch.ones(BUFFER_BYTES // 4)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return BUFFER_BYTES / best


class DiskBandwidth:
    """Random reads of a size, by the product's own reader at full depth.

    Asked for after `close`, it answers from `measure_all`.
    """

    def __init__(self, folder: Path, device: str | None):
        from kvswap_torch import _C

        self._probe = _C.DiskProbe(str(folder), device or "", SCRATCH_BYTES)
        while self._probe.filled_bytes < SCRATCH_BYTES and self._probe.fill()[0]:
            pass
        self._probe.sync()
        self._least = max(512, self._probe.alignment_bytes)
        self._known: dict[int, float] = {}

    def bytes_per_second(self, read_bytes: int) -> float:
        """Of the power of two nearest to `read_bytes`, at most a mebibyte."""
        nearest = 1 << round(math.log2(max(1, read_bytes)))
        size = min(max(nearest, self._least), LARGE_READ_BYTES)
        if size not in self._known:
            self._known[size] = self._probe.measure(size, READ_DEPTH, READ_SECONDS)[0]
        return self._known[size]

    def measure_all(self) -> None:
        """Every size that can be asked for."""
        size = self._least
        while size <= LARGE_READ_BYTES:
            self.bytes_per_second(size)
            size *= 2

    def measured(self) -> dict[str, int]:
        """Bytes a second by size of a read, of what was asked for."""
        return {str(size): round(value) for size, value in sorted(self._known.items())}

    def close(self) -> None:
        self._probe.close()


@dataclass(frozen=True)
class Floor:
    """The least time of a step, ms: reading memory and reading the disk overlap at best."""

    weights_ms: float
    summary_ms: float
    kv_ms: float
    disk_ms: float

    @property
    def memory_ms(self) -> float:
        return self.weights_ms + self.summary_ms + self.kv_ms

    @property
    def ms(self) -> float:
        return max(self.memory_ms, self.disk_ms)


def floor_of(
    cell: Cell, key: str, row: dict[str, Any], memory_bandwidth: float, disk: DiskBandwidth
) -> Floor:
    """row: what `measure.py` has found of the contender."""
    weights = WEIGHTS.get(key, "bf16")
    selected = cell.shape.kv_bytes(cell.batch, SELECTED_TOKENS)
    kept = cell.shape.kv_bytes(cell.batch, KEPT_TOKENS)
    kv_bytes = selected if key in FLOORS else cell.kv_bytes
    if key in LLAMA and key not in FLOORS:
        kv_bytes = row["kv_memory_bytes"]
    if is_on_session(key):
        kv_bytes = selected + kept
    read = row["bytes_read"]
    size = row.get("bytes_per_read", LARGE_READ_BYTES)
    return Floor(
        weights_ms=1e3 * touched_bytes(cell.shape, weights=weights) / memory_bandwidth,
        summary_ms=1e3 * row.get("summary_bytes", 0) / memory_bandwidth,
        kv_ms=1e3 * kv_bytes / memory_bandwidth,
        disk_ms=1e3 * read / disk.bytes_per_second(size) if read else 0.0,
    )


def describe(key: str, floor: Floor, row: dict[str, Any]) -> dict[str, Any]:
    """The floor's parts, how far above it the row's median is, and what most of that is.

    Each part of a step is held against what it has to read: the model its weights, choosing the
    summary, attention K and V; where model and attention are timed together, both, and what the
    kernel pages in while they run. A wait has to be what reading takes longer than computing.
    """
    parts = row["parts_ms"]
    waiting = max(0.0, floor.disk_ms - floor.memory_ms)
    least = {"model": floor.weights_ms, "select": floor.summary_ms, "attend": floor.kv_ms}
    model = next(name for name in parts if name.startswith("model"))
    if "attend" not in parts:
        least[model] = floor.weights_ms + floor.kv_ms
    waits_in = {"mmap": model, "restore": "update", "ollm": "update"}.get(key, "wait")
    least[waits_in] = least.get(waits_in, 0.0) + waiting
    over = {name: value - least.get(name, 0.0) for name, value in parts.items()}
    largest = max(over, key=over.__getitem__)
    return {
        "ms": round(floor.ms, 3),
        "weights_ms": round(floor.weights_ms, 3),
        "summary_ms": round(floor.summary_ms, 3),
        "kv_ms": round(floor.kv_ms, 3),
        "disk_ms": round(floor.disk_ms, 3),
        "distance": round(row["ms"] / floor.ms, 2),
        "largest_part_over": [largest, round(over[largest], 2)],
    }
