"""How often a kept group is chosen again, by replacement policy and capacity.

A plain model of the engine's reuse buffer (KVSwap, sections 3.4.3 and appendix A.1), run over
recorded choices: no disk, no timing, only who is there and who leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

POLICIES = ("fifo", "lru", "unused")

Choices = Sequence[Iterable[int]]
"""Of one layer and sequence: the groups that each step chose."""


@dataclass
class _Page:
    group: int | None = None
    loaded: int = 0  # step
    used: int = 0


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
        self._pages = [_Page() for _ in range(capacity)]
        self._at: dict[int, _Page] = {}
        self._step = 0

    def step(self, groups: Iterable[int]) -> tuple[int, int]:
        """One step's choice; returns how many were there, and how many were loaded."""
        wanted = sorted(set(groups))
        if len(wanted) > len(self._pages):
            raise ValueError(
                f"reuse buffer: capacity must be at least the {len(wanted)} groups of a step, got "
                f"{len(self._pages)}"
            )
        self._step += 1
        for group in wanted:
            if group in self._at:
                self._at[group].used = self._step
        loads = [group for group in wanted if group not in self._at]
        free = [page for page in self._pages if page.group is None or page.used < self._step]
        for group, page in zip(loads, sorted(free, key=self._leaving_rank), strict=False):
            if page.group is not None:
                del self._at[page.group]
            page.group, page.loaded, page.used = group, self._step, self._step
            self._at[group] = page
        return len(wanted) - len(loads), len(loads)

    def _leaving_rank(self, page: _Page) -> int:
        if page.group is None:
            return 0
        return {"fifo": page.loaded, "lru": page.used, "unused": 1}[self.policy]


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
