"""How often a kept group is chosen again, by replacement policy and capacity.

A plain model of the engine's reuse buffer (KVSwap, sections 3.4.3 and appendix A.1), run over
recorded choices: no disk, no timing, only who is there and who leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

POLICIES = ("fifo", "lru", "unused")

Choices = Sequence[Iterable[int]]
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


def hit_rate(choices: Choices, capacity: int, policy: str) -> float:
    """Share of the chosen groups that were still there; the first step is not counted."""
    buffer = ReuseBuffer(capacity, policy)
    found = loaded = 0
    for number, groups in enumerate(choices):
        hits, loads = buffer.step(groups)
        if number > 0:
            found, loaded = found + hits, loaded + loads
    return found / (found + loaded) if found + loaded else 0.0


def reuse_table(
    choices: Sequence[Choices], capacities: Sequence[int], policy: str
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


def overlap(choices: Choices) -> float:
    """Share of a step's groups that the step before chose too (section 3.4.2)."""
    sets = [set(groups) for groups in choices]
    shares = [len(now & before) / len(now) for before, now in pairwise(sets) if now]
    return sum(shares) / len(shares) if shares else 0.0
