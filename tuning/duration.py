"""How long tuning will take at least, from a few passes of the model, before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvswap_torch.tuning.progress import shown
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.timing import CHOICES_TIMED, ROUNDS, STEPS, WARM_UP, TimingPlan

SHORT, LONG = 128, 1024  # tokens of the passes that are timed; a context has at least LONG
FILL_BYTES_PER_S = 1 << 30  # of a cache with random keys and values


@dataclass(frozen=True)
class Pace:
    """Seconds of a model's passes: `token` of one token, ``linear * n + square * n**2`` of n."""

    token: float
    linear: float
    square: float

    def reading(self, tokens: int) -> float:
        return self.linear * tokens + self.square * tokens**2


def pace_of(decoder: Any, device: torch.device) -> Pace:
    """By a pass of one token, a short one and a longer one."""

    def seconds(tokens: int) -> float:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        began = time.monotonic()
        with torch.inference_mode():
            decoder(input_ids=ids, use_cache=False)
        return time.monotonic() - began

    seconds(SHORT)  # the first pass loads what later ones have
    token, short, long = seconds(1), seconds(SHORT), seconds(LONG)
    square = max(0.0, (long - short * LONG / SHORT) / (LONG**2 - SHORT * LONG))
    return Pace(token, max(0.0, long - square * LONG**2) / LONG, square)


@dataclass(frozen=True)
class Duration:
    """Seconds that the parts of tuning take at least; 0 where measurements are kept."""

    disk: float
    calibrating: float
    timing: float

    def __str__(self) -> str:
        parts = (("disk", self.disk), ("calibration", self.calibrating), ("steps", self.timing))
        left = [f"{name} {shown(seconds)}" for name, seconds in parts if seconds > 0]
        if not left:
            return "all measurements are kept from an earlier run"
        total = self.disk + self.calibrating + self.timing
        return f"measuring takes at least {shown(total)}: {', '.join(left)}"


def calibrating_seconds(pace: Pace, fitted: Iterable[int], held_out: Iterable[int]) -> float:
    """Samples of these lengths are read twice to fit, and once for recall and once for choices."""
    return 2 * (sum(map(pace.reading, fitted)) + sum(map(pace.reading, held_out)))


def timing_seconds(pace: Pace, plan: TimingPlan) -> float:
    """Sessions are filled, then decode; a step takes no less than a pass of one token."""
    steps = CHOICES_TIMED * ROUNDS * (STEPS + WARM_UP)
    filled = sum(place.batch * place.context for place in plan.places()) * plan.token_bytes
    return len(plan.places()) * steps * pace.token + filled / FILL_BYTES_PER_S


def least_duration(
    parts: Any,
    missing: Sequence[bool],
    disk_seconds: float,
    samples: Callable[[], Sequence[Sequence[Sample]]],
    plan: TimingPlan,
) -> Duration:
    """Runs the model shortly, if anything is missing.

    Parameters
    ----------
    parts
        The model's, as `Calibrator` has them.
    missing
        Whether disk, calibration and timings are still to be measured.
    samples
        Gives those to fit and those to measure; called where the calibration is missing.
    """
    if not any(missing):
        return Duration(0, 0, 0)
    disk, calibration, timings = missing
    pace = pace_of(parts.decoder, parts.device)
    lengths = [[len(each.ids) for each in side] for side in samples()] if calibration else [[], []]
    return Duration(
        disk_seconds if disk else 0,
        calibrating_seconds(pace, *lengths),
        timing_seconds(pace, plan) if timings else 0,
    )
