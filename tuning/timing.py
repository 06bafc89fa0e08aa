"""Measures decoding steps over sampled batch, context, rank, group size and loads (A.3)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvswap_torch.config import SwapConfig
from kvswap_torch.tuning.costs import layers_ahead
from kvswap_torch.tuning.progress import Progress, shown
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.step_model import LayerLoads, LoadingStep
from kvswap_torch.tuning.synthetic import Override, StepTime, SyntheticDecode, median_step
from kvswap_torch.tuning.traffic import Replayed, TrafficTable

WARM_UP = 4  # steps after filling, which are slower
STEPS = 10
ROUNDS = 2  # over the choices of one session, so that a slow spell falls on all of them
FILL_BYTES_MAX = 3 << 29  # of a session's keys and values; contexts beyond are extrapolated
LOAD_SHARES = (0.0, 1.0)  # of the attended groups, beside what was recorded
CHOICES_TIMED = 2 * (1 + len(LOAD_SHARES))  # in each session, at two contexts


@dataclass(frozen=True, order=True)
class Place:
    """A session to measure in: everything that needs a new one."""

    batch: int
    context: int
    group_tokens: int
    rank: int


@dataclass(frozen=True)
class Timing:
    """A measured point.

    Parameters
    ----------
    place
        With the context that was in the cache.
    total, parts, counts
        As `StepTime`.
    """

    place: Place
    total: float
    parts: dict[str, float]
    counts: dict[str, float]

    @property
    def loads(self) -> bool:
        """Whether anything was read from the disk."""
        return self.counts["reads"] > 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Timing:
        return cls(Place(**fields["place"]), fields["total"], fields["parts"], fields["counts"])


@dataclass(frozen=True)
class TimingPlan:
    """What to measure for batches and contexts up to a limit.

    Parameters
    ----------
    token_bytes
        K and V of one token in all layers.
    ranks
        The smallest and the largest of interest.
    groups
        The same of G.
    tokens
        Attended per step, sinks and tail apart.
    """

    batch_max: int
    context_max: int
    token_bytes: int
    ranks: tuple[int, int]
    groups: tuple[int, int]
    tokens: int

    @property
    def batches(self) -> list[int]:
        """1, 2, 4, .. and the largest."""
        powers = [1 << i for i in range(self.batch_max.bit_length())]
        return sorted({min(power, self.batch_max) for power in powers} | {self.batch_max})

    def context(self, batch: int) -> int:
        """The longest context that is filled at this batch."""
        most = FILL_BYTES_MAX // (batch * self.token_bytes)
        return max(min(self.context_max, most), min(self.context_max, 4 * self.tokens))

    def places(self) -> list[Place]:
        """One session each; the first batch and the last are measured with more settings."""
        low, high = self.ranks
        found = []
        for batch in self.batches:
            context = self.context(batch)
            found.append(Place(batch, context, min(max(4, self.groups[0]), self.groups[1]), high))
            if batch in (self.batches[0], self.batches[-1]):
                found.append(Place(batch, context, self.groups[1], low))
                found.append(Place(batch, context, self.groups[0], (low + high) // 2))
        return list(dict.fromkeys(found))


def measure(
    model: Any,
    path: Path,
    plan: TimingPlan,
    base: SwapConfig,
    traffic: TrafficTable,
    known: Sequence[Timing] = (),
    progress: Progress | None = None,
) -> Iterator[list[Timing]]:
    """The points of one session after the other; sessions that are known are skipped.

    Parameters
    ----------
    base
        With a projection file that has columns for the largest rank; its groups and pages are set
        for each session.
    traffic
        Recorded choices.
    known
        From an earlier run, interrupted or for another memory limit. One of a shorter context
        than is planned does not count.
    """
    done: dict[tuple[int, int, int], int] = {}  # the longest context
    for place in (timing.place for timing in known):
        key = (place.batch, place.group_tokens, place.rank)
        done[key] = max(place.context, done.get(key, 0))
    missing = [
        place
        for place in plan.places()
        if done.get((place.batch, place.group_tokens, place.rank), 0) < place.context
    ]
    for number, place in enumerate(missing):
        if progress is not None:
            progress("timing steps", number, len(missing))
        yield measure_session(model, path, place, base, traffic)
    if progress is not None:
        progress("timing steps", len(missing), len(missing))


def measure_session(
    model: Any, path: Path, place: Place, base: SwapConfig, traffic: TrafficTable
) -> list[Timing]:
    """Recorded choices and steady turnovers, at the place's context and at a quarter of it."""
    tokens = traffic.choices.tokens
    groups = tokens // place.group_tokens
    config = dataclasses.replace(base, solutions=()).with_settings(
        {
            "selection.group_tokens": place.group_tokens,
            "summary.rank": place.rank,
            "selection.top_k_groups": groups,
            "memory.pages_per_layer": max(3 * groups // 2, base.selection.max_step_tokens),
        }
    )
    found = []
    with SyntheticDecode(model, path, config, place.batch, place.context) as decode:
        for context in (place.context, place.context // 4):
            if context < 2 * tokens:
                continue
            decode.crop(context)
            sealed = (context - config.selection.recent_tokens) // place.group_tokens
            overrides: list[Override] = [
                Replayed(traffic, place.group_tokens, context, place.batch)
            ]
            overrides += [
                Turnover(decode.layers, place.batch, sealed, groups, round(share * groups))
                for share in LOAD_SHARES
            ]
            times: list[list[StepTime]] = [[] for _ in overrides]
            for _ in range(ROUNDS):
                for each, override in zip(times, overrides, strict=True):
                    each += decode.steps(STEPS, override, WARM_UP)
            at = dataclasses.replace(place, context=context)
            for time in map(median_step, times):
                found.append(Timing(at, time.total, time.parts, time.counts))
    return found


def loading_steps(timings: Sequence[Timing], config: SwapConfig, layers: int) -> list[LoadingStep]:
    """Each timing with loads beside the one of its place without."""
    without = {timing.place: timing.total for timing in timings if not timing.loads}
    ahead = len(layers_ahead(config, layers))
    return [
        LoadingStep(
            timing.total,
            without[timing.place],
            layers,
            ahead,
            LayerLoads(timing.counts["reads"] / layers, timing.counts["bytes_read"] / layers),
        )
        for timing in timings
        if timing.loads and timing.place in without
    ]


class Turnover:
    """Choices of which so many are new at each step, drawn at random from all groups."""

    def __init__(self, layers: int, batch: int, sealed: int, groups: int, loads: int):
        self._rng = np.random.default_rng(0)
        self._sealed, self._loads = sealed, loads
        first = max(0, sealed - groups)
        start = list(range(first, min(sealed, first + groups)))
        self._now = [[list(start) for _ in range(batch)] for _ in range(layers)]

    def __call__(self, step: int) -> list[list[list[int]]]:
        if step > 0 and self._loads > 0:
            self._now = [[self._next(groups) for groups in layer] for layer in self._now]
        return self._now

    def _next(self, groups: list[int]) -> list[int]:
        kept = groups[self._loads :]
        free = np.setdiff1d(np.arange(self._sealed), np.array(groups))
        drawn = self._rng.choice(free, min(self._loads, len(free)), replace=False)
        return kept + drawn.tolist()


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
