"""What a step reads from the disk with given settings: recorded choices, replayed and merged.

A plain model of the engine's reuse buffer (KVSwap, sections 3.4.3 and appendix A.1), run over
recorded choices: no disk, no timing, only who is there and who leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvswap_torch.tuning.choices import Choices, stretched

POLICIES = ("fifo", "lru", "unused")

Chosen = Sequence[Iterable[int]]
"""Of one layer and sequence: the groups that each step chose."""


class ReuseBuffer:
    """The pages of one layer and sequence, as the engine replaces them.

    Parameters
    ----------
    capacity
        Groups kept; at least as many as one step chooses.
    policy
        Who leaves when a place is needed, empty pages first: ``fifo`` the oldest load, ``lru`` the
        least recently used, ``unused`` any. What the step itself uses stays; ties leave in order
        of the pages.
    """

    def __init__(self, capacity: int, policy: str):
        if policy not in POLICIES:
            raise ValueError(f"reuse buffer: policy must be one of {POLICIES}, got {policy!r}")
        if capacity < 1:
            raise ValueError(f"reuse buffer: capacity must be positive, got {capacity}")
        self.policy = policy
        self._group = np.full(capacity, -1, dtype=np.int64)  # of each page
        self._loaded = np.zeros(capacity, dtype=np.int64)  # step
        self._used = np.zeros(capacity, dtype=np.int64)
        self._page = np.full(1024, -1, dtype=np.int64)  # of each group; -1: not kept
        self._step = 0

    @property
    def groups(self) -> set[int]:
        """What is kept now."""
        return set(self._group[self._group >= 0].tolist())

    def step(self, groups: Iterable[int]) -> tuple[int, int]:
        """One step's choice; returns how many were there, and how many were loaded."""
        wanted = np.unique(np.fromiter(groups, dtype=np.int64))
        loads = self.plan(wanted)
        return len(wanted) - len(loads), len(loads)

    def plan(self, wanted: np.ndarray) -> np.ndarray:
        """One step's choice, rising and without repeats; returns what was loaded, rising."""
        if len(wanted) > len(self._group):
            raise ValueError(
                f"reuse buffer: capacity must be at least the {len(wanted)} groups of a step, got "
                f"{len(self._group)}"
            )
        self._step += 1
        if len(wanted) and wanted[-1] >= len(self._page):
            more = np.full(2 * int(wanted[-1]) - len(self._page) + 2, -1, dtype=np.int64)
            self._page = np.concatenate([self._page, more])
        pages = self._page[wanted]
        self._used[pages[pages >= 0]] = self._step
        loads = wanted[pages < 0]
        if len(loads):
            self._load(loads)
        return loads

    def _load(self, loads: np.ndarray) -> None:
        free = np.flatnonzero((self._group < 0) | (self._used < self._step))
        pages = free[np.argsort(self._leaving_rank(free), kind="stable")[: len(loads)]]
        leaving = self._group[pages]
        self._page[leaving[leaving >= 0]] = -1
        self._page[loads] = pages
        self._group[pages] = loads
        self._loaded[pages] = self._used[pages] = self._step

    def _leaving_rank(self, pages: np.ndarray) -> np.ndarray:
        rank = {"fifo": self._loaded, "lru": self._used, "unused": np.ones_like(self._used)}
        return np.where(self._group[pages] < 0, 0, rank[self.policy][pages])


def hit_rate(choices: Chosen, capacity: int, policy: str) -> float:
    """Share of the chosen groups that were still there; the first step is not counted."""
    buffer = ReuseBuffer(capacity, policy)
    found = loaded = 0
    for number, groups in enumerate(choices):
        hits, loads = buffer.step(groups)
        if number > 0:
            found, loaded = found + hits, loaded + loads
    return found / (found + loaded) if found + loaded else 0.0


def reuse_table(
    choices: Sequence[Chosen], capacities: Sequence[int], policy: str
) -> dict[int, float]:
    """Capacity -> hit rate, averaged over layers and sequences (appendix A.1).

    Parameters
    ----------
    choices
        Of each layer and sequence; each counts the same.
    """
    if not choices:
        raise ValueError("reuse_table: must have the choices of at least one layer, got none")
    return {
        capacity: sum(hit_rate(one, capacity, policy) for one in choices) / len(choices)
        for capacity in capacities
    }


def overlap(choices: Chosen) -> float:
    """Share of a step's groups that the step before chose too (section 3.4.2)."""
    sets = [set(groups) for groups in choices]
    shares = [len(now & before) / len(now) for before, now in pairwise(sets) if now]
    return sum(shares) / len(shares) if shares else 0.0


@dataclass(frozen=True)
class Traffic:
    """Of one layer, sequence and step, on average.

    Parameters
    ----------
    attended, loads
        Groups chosen, and of them not in memory.
    reads, bytes_read
        What is asked of the disk, neighbours merged, gaps included.
    """

    attended: float
    loads: float
    reads: float
    bytes_read: float

    @property
    def hit_rate(self) -> float:
        return 1 - self.loads / self.attended if self.attended else 0.0

    def scaled(self, share: float) -> Traffic:
        """Of so many times the groups."""
        own = (self.attended, self.loads, self.reads, self.bytes_read)
        return Traffic(*(share * each for each in own))


@dataclass(frozen=True)
class Merging:
    """As `SwapConfig`: neighbours over a gap up to the first, reads up to the second."""

    record_bytes: int
    gap_bytes: int
    bytes_max: int


UNMERGED = Merging(4096, 0, 4096)


def merged(groups: Sequence[int], merging: Merging) -> tuple[int, int]:
    """Reads and bytes that fetch these groups, rising, of one sequence in order on disk."""
    reads = total = 0
    start = end = 0
    for group in groups:
        at = group * merging.record_bytes
        joins = reads and at - end <= merging.gap_bytes
        if not (joins and at + merging.record_bytes - start <= merging.bytes_max):
            total += end - start
            reads, start = reads + 1, at
        end = at + merging.record_bytes
    return reads, total + end - start


Steps = list[np.ndarray]
"""Of one layer and sequence: the groups of each step, rising."""


class TrafficTable:
    """Replays of recorded choices, each made once."""

    def __init__(self, choices: Choices):
        self.choices = choices
        self._steps: dict[tuple[int, int], list[list[Steps]]] = {}
        self._known: dict[tuple, list[Traffic]] = {}

    def get(
        self, group: int, pages: int, policy: str, context: int, merging: Merging
    ) -> list[Traffic]:
        """For each layer what it reads; the steps in which an empty buffer fills do not count.

        Parameters
        ----------
        pages
            Groups kept per layer and sequence.
        context
            Tokens to imagine the recorded choices in.
        """
        key = (group, pages, policy, context, merging)
        if key not in self._known:
            self._known[key] = [
                _mean([_replay(steps, pages, policy, merging) for steps in layer])
                for layer in self.steps(group, context)
            ]
        return self._known[key]

    def reuse(self, group: int, pages: int, policy: str, context: int) -> list[Traffic]:
        """The same where only who is there matters, and not how reads are merged."""
        return self.get(group, pages, policy, context, UNMERGED)

    def steps(self, group: int, context: int) -> list[list[Steps]]:
        """For each layer and recorded sample its steps, as they would be in that context."""
        if (group, context) not in self._steps:
            recorded = self.choices.recorded[group]
            self._steps[group, context] = [
                [
                    [
                        stretched(each.chosen(layer, step), group, each.context, context)
                        for step in range(each.steps)
                    ]
                    for each in recorded
                ]
                for layer in range(len(recorded[0].layers))
            ]
        return self._steps[group, context]


class Replayed:
    """Recorded choices as overrides of a session's, each sequence somewhere else in them.

    Called with the number of a step; gives the groups of each layer and sequence.
    """

    def __init__(self, table: TrafficTable, group_tokens: int, context: int, batch: int):
        self._layers = table.steps(group_tokens, context)
        self._batch = batch

    def __call__(self, step: int) -> list[list[list[int]]]:
        return [
            [self._chosen(samples, sequence, step) for sequence in range(self._batch)]
            for samples in self._layers
        ]

    @staticmethod
    def _chosen(samples: list[Steps], sequence: int, step: int) -> list[int]:
        steps = samples[sequence % len(samples)]
        return steps[(step + 11 * (sequence // len(samples))) % len(steps)].tolist()


def _replay(steps: Steps, pages: int, policy: str, merging: Merging) -> Traffic:
    buffer = ReuseBuffer(pages, policy)
    attended = loads = reads = total = counted = 0
    for number, groups in enumerate(steps):
        loaded = buffer.plan(groups)
        if number < len(steps) // 4:
            continue
        asked, size = merged(loaded.tolist(), merging)
        attended, loads = attended + len(groups), loads + len(loaded)
        reads, total, counted = reads + asked, total + size, counted + 1
    each = 1 / max(1, counted)
    return Traffic(attended * each, loads * each, reads * each, total * each)


def _mean(traffic: Sequence[Traffic]) -> Traffic:
    count = len(traffic)
    return Traffic(
        sum(each.attended for each in traffic) / count,
        sum(each.loads for each in traffic) / count,
        sum(each.reads for each in traffic) / count,
        sum(each.bytes_read for each in traffic) / count,
    )


REPLACEMENT_GAIN_MIN = 0.02  # of what is loaded


def pick_replacement(traffic: TrafficTable, context: int) -> str:
    """Who leaves the reuse buffer: the policy that finds most; the paper's where it finds as much.

    Judged with twice as much kept as is attended.
    """
    group = traffic.choices.middle_group
    pages = 2 * traffic.choices.tokens // group
    loads = {
        policy: sum(each.loads for each in traffic.reuse(group, pages, policy, context))
        for policy in POLICIES
    }
    best = min(POLICIES, key=loads.__getitem__)
    return best if loads[best] < (1 - REPLACEMENT_GAIN_MIN) * loads["fifo"] else "fifo"
