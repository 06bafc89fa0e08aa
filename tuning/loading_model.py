"""What loading adds to a decoding step, from pairs of steps that differ in nothing else (A.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvswap_torch.tuning.fit import descend

FIRST_READS = 20  # of a layer: beyond them submitting is done before reading is
STARTS = ((5e-5, 5e-6, 1e-7, 1e-11, 0.5), (5e-5, 5e-6, 5e-6, 1e-11, 1.0))
BESIDE_MAX = 2.0  # a layer's loads are asked for one layer ahead, and its period is a mean


class Disk(Protocol):
    """What is known of the disk."""

    def seconds(self, count: float, record_bytes: float) -> float:
        """Time of so many reads submitted together."""


@dataclass(frozen=True)
class LayerLoads:
    """What one layer of a step asks of the disk, all sequences together."""

    reads: float
    bytes_read: float


@dataclass(frozen=True)
class LoadingModel:
    """Seconds that loads add to a step.

    The cores that hand reads over, take them back and check their bytes are the cores that
    compute, so that part is hidden by nothing. The disk's own time is hidden by what is computed
    beside it, where a layer's loads are known ahead.

    Parameters
    ----------
    layer_s
        Of the cores, for a layer that loads at all.
    first_s
        For each of its first `FIRST_READS` reads, besides.
    read_s, byte_s
        For each read and byte.
    beside
        Part of a layer's period (the step without loads, over its layers) that hides the disk.
    """

    layer_s: float = 0.0
    first_s: float = 0.0
    read_s: float = 0.0
    byte_s: float = 0.0
    beside: float = 1.0

    def busy(self, loads: LayerLoads) -> float:
        """Seconds that one layer's loads take of the cores."""
        return (
            self.layer_s * min(1.0, loads.reads)
            + self.first_s * min(FIRST_READS, loads.reads)
            + self.read_s * loads.reads
            + self.byte_s * loads.bytes_read
        )

    def waited(self, disk_seconds: float, period: float) -> float:
        """Seconds that a layer waits for loads asked for one period ahead; 0 for not ahead."""
        return max(0.0, disk_seconds - self.beside * period)


@dataclass(frozen=True)
class LoadingStep:
    """A measured step with loads, and the same without.

    Parameters
    ----------
    seconds, seconds_without
        Of the whole step.
    layers, ahead
        On disk, and those of them that read ahead.
    loads
        Of a layer, on average.
    """

    seconds: float
    seconds_without: float
    layers: int
    ahead: int
    loads: LayerLoads


def disk_seconds(disk: Disk, loads: LayerLoads) -> float:
    """Until all of a layer's loads are there."""
    return disk.seconds(loads.reads, loads.bytes_read / loads.reads) if loads.reads else 0.0


def fit_loading(steps: Sequence[LoadingStep], disk: Disk) -> LoadingModel:
    """The model with the least mean error of whole steps, in relative terms.

    Without steps: loads cost what the disk takes.
    """
    if not steps:
        return LoadingModel()
    each_disk = [disk_seconds(disk, step.loads) for step in steps]

    def model(logs: Sequence[float]) -> LoadingModel:
        *cores, beside = (math.exp(value) for value in logs)
        return LoadingModel(*cores, min(beside, BESIDE_MAX))

    def loss(logs: Sequence[float]) -> float:
        tried = model(logs)
        return sum(
            abs(math.log(_predict(tried, step, seconds) / step.seconds))
            for step, seconds in zip(steps, each_disk, strict=True)
        )

    found = [descend(loss, [math.log(value) for value in start]) for start in STARTS]
    return model(min(found, key=loss))


def _predict(model: LoadingModel, step: LoadingStep, seconds: float) -> float:
    period = step.seconds_without / step.layers
    waited = step.ahead * model.waited(seconds, period)
    waited += (step.layers - step.ahead) * model.waited(seconds, 0.0)
    return step.seconds_without + step.layers * model.busy(step.loads) + waited
