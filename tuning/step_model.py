"""What a step computes takes, from measured points: linear parts, fitted one by one (A.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvswap_torch.tuning.fit import dot, fit_nonnegative


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
        Batch -> seconds of what the session has no clock for: the model's own work and prediction.
    """

    coefficients: dict[str, tuple[float, ...]]
    model: dict[int, float]

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds by use."""
        parts = {name: dot(row, self.coefficients[name]) for name, row in work.rows().items()}
        batches = sorted(self.model)
        own = np.interp(work.batch, batches, [self.model[batch] for batch in batches])
        return parts | {"model": float(own)}


def fit_steps(points: Sequence[tuple[Work, Mapping[str, float]]]) -> StepModel:
    """Fits each part by itself to steps that load nothing: their work and seconds by part.

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
    return StepModel(coefficients, own)
