"""What a decoding step takes, computing and loading, fitted to measured steps (A.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np

ROUNDS = 200
STEP_FIRST = 0.5  # in natural logarithms
STEP_LAST = 1e-3


def fit_nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients c >= 0 that make ``rows @ c`` close to `values`, in relative terms.

    Parameters
    ----------
    rows
        ``[points][features]``; a column of zeros gets 0.
    values
        ``[points]``, positive.
    """
    matrix, target = np.asarray(rows, dtype=float), np.asarray(values, dtype=float)
    weight = 1 / np.maximum(target, 1e-3 * max(target.max(initial=0.0), 1e-12))
    matrix, target = matrix * weight[:, None], target * weight
    norms = np.linalg.norm(matrix, axis=0)
    active = [i for i, norm in enumerate(norms) if norm > 0]
    found = np.zeros(matrix.shape[1])
    while active:
        scaled = matrix[:, active] / norms[active]
        solved = np.linalg.lstsq(scaled, target, rcond=None)[0] / norms[active]
        if solved.min() >= 0:
            found[active] = solved
            break
        active.pop(int(np.argmin(solved * norms[active])))
    return tuple(float(value) for value in found)


def dot(row: Sequence[float], coefficients: Sequence[float]) -> float:
    """The fitted value of one row."""
    return float(sum(a * b for a, b in zip(row, coefficients, strict=True)))


def descend(loss: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """A minimum of `loss` by steps along each axis that halve when none helps."""
    best, least = list(start), loss(start)
    step = STEP_FIRST
    for _ in range(ROUNDS):
        moved = False
        for axis in range(len(best)):
            for sign in (step, -step):
                tried = best[:axis] + [best[axis] + sign] + best[axis + 1 :]
                if (value := loss(tried)) < least:
                    best, least, moved = tried, value, True
        if not moved:
            step /= 2
            if step < STEP_LAST:
                break
    return best


@dataclass(frozen=True)
class Work:
    """What a step computes, summed over its layers.

    Parameters
    ----------
    layers, batch
        Of the model, and sequences.
    scanned_bytes
        Of the summaries.
    scanned_tokens
        Their tokens, over layers and sequences.
    groups
        Attended, over layers and sequences.
    attended_tokens
        In the attended groups, sinks and tail.
    """

    layers: int
    batch: int
    scanned_bytes: float
    scanned_tokens: float
    groups: float
    attended_tokens: float

    def rows(self) -> dict[str, tuple[float, ...]]:
        """The features of each part."""
        count = self.layers * self.batch
        return {
            "select": (self.layers, count, self.scanned_bytes, self.scanned_tokens),
            "plan": (self.layers, self.groups),
            "attend": (self.layers, self.groups, self.attended_tokens),
            "append": (self.layers, count),
        }


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step that loads nothing.

    Parameters
    ----------
    coefficients
        By part, for the features of `Work.rows`.
    model
        Batch -> seconds of what the session has no clock for: the model's own work.
    predict
        Batch -> seconds that one layer's query takes to be predicted; empty: not known, none.
    """

    coefficients: dict[str, tuple[float, ...]]
    model: dict[int, float]
    predict: dict[int, float] = field(default_factory=dict)

    def predict_seconds(self, batch: int) -> float:
        """Of one layer's query."""
        return _between(self.predict, batch) if self.predict else 0.0

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds by use."""
        parts = {name: dot(row, self.coefficients[name]) for name, row in work.rows().items()}
        return parts | {"model": _between(self.model, work.batch)}


def _between(known: Mapping[int, float], batch: int) -> float:
    batches = sorted(known)
    return float(np.interp(batch, batches, [known[each] for each in batches]))


def fit_steps(points: Sequence[tuple[Work, Mapping[str, float]]], predicted: int = 0) -> StepModel:
    """Fits each part by itself to steps that load nothing: their work and seconds by part.

    Parameters
    ----------
    predicted
        Layers whose query was predicted in them.

    Raises
    ------
    ValueError
        Without points.
    """
    if not points:
        raise ValueError("fit_steps: must have measured points, got none")
    coefficients = {
        part: fit_nonnegative(
            [work.rows()[part] for work, _ in points], [parts[part] for _, parts in points]
        )
        for part in points[0][0].rows()
    }
    batches = sorted({work.batch for work, _ in points})
    own = {
        # A median: the machine is slower for a while now and then.
        batch: median(parts["model"] for work, parts in points if work.batch == batch)
        for batch in batches
    }
    ahead = {
        batch: median(parts["predict"] for work, parts in points if work.batch == batch) / predicted
        for batch in batches
        if predicted
    }
    return StepModel(coefficients, own, ahead)


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
