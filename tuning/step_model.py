"""What a decoding step takes, from measured points: a few linear parts, fitted one by one (A.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuning.fit import dot, fit_nonnegative
from tuning.timing import Timing


@dataclass(frozen=True)
class Work:
    """What a step does, summed over its layers.

    Parameters
    ----------
    layers, batch
        Of the model, and sequences.
    scanned_bytes
        Of the summaries.
    scanned_tokens
        Their tokens, over layers and sequences.
    groups, loads
        Attended and loaded, over layers and sequences.
    attended_tokens
        In the attended groups, sinks and tail.
    loaded_bytes
        From disk.
    """

    layers: int
    batch: int
    scanned_bytes: float
    scanned_tokens: float
    groups: float
    loads: float
    attended_tokens: float
    loaded_bytes: float

    def rows(self) -> dict[str, tuple[float, ...]]:
        """The features of each part."""
        count = self.layers * self.batch
        return {
            "select": (self.layers, count, self.scanned_bytes, self.scanned_tokens),
            "plan": (self.layers, self.groups, self.loads),
            "attend": (self.layers, self.groups, self.attended_tokens),
            "append": (self.layers, count),
        }


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step's computation.

    Parameters
    ----------
    coefficients
        By part, for the features of `Work.rows`.
    model
        Batch -> seconds of what the session has no clock for: the model's own work and prediction.
    loaded_byte
        Seconds that each loaded byte adds to it: checksums, and the core that reading takes.
    waited
        Seconds that each second of waiting adds to it: threads have gone to sleep and caches cold.
    """

    coefficients: dict[str, tuple[float, ...]]
    model: dict[int, float]
    loaded_byte: float
    waited: float = 0.0

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds by use; what is waited for is no part of it."""
        parts = {name: dot(row, self.coefficients[name]) for name, row in work.rows().items()}
        batches = sorted(self.model)
        own = np.interp(work.batch, batches, [self.model[batch] for batch in batches])
        return parts | {"model": float(own) + self.loaded_byte * work.loaded_bytes}


def fit_steps(points: Sequence[tuple[Work, Timing]]) -> StepModel:
    """Fits each part by itself.

    Raises
    ------
    ValueError
        Without points.
    """
    if not points:
        raise ValueError("fit_steps: must have measured points, got none")
    coefficients = {}
    for part in points[0][0].rows():
        rows = [work.rows()[part] for work, _ in points]
        coefficients[part] = fit_nonnegative(rows, [timing.parts[part] for _, timing in points])
    batches = sorted({work.batch for work, _ in points})
    rows = [
        [float(work.batch == batch) for batch in batches]
        + [work.loaded_bytes, timing.parts["wait"]]
        for work, timing in points
    ]
    values = [timing.parts["model"] for _, timing in points]
    *own, loaded_byte, waited = fit_nonnegative(rows, values)
    return StepModel(coefficients, dict(zip(batches, own, strict=True)), loaded_byte, waited)
