"""How often a kept group is chosen again, by replacement policy and capacity.

A plain model of the engine's reuse buffer (KVSwap, sections 3.4.3 and appendix A.1), run over
recorded choices: no disk, no timing, only who is there and who leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

POLICIES = ("fifo", "lru", "unused")

Choices = Sequence[Iterable[int]]
"""Of one layer and sequence: the groups that each step chose."""


class ReuseBuffer:
    """The pages of one layer and sequence.

    Parameters
    ----------
    capacity
        Groups kept; at least as many as one step chooses.
    policy
        Who leaves when a place is needed: ``fifo`` the oldest load, ``lru`` the least recently
        used, ``unused`` all that the step before did not use. What the step itself uses stays.
    """

    def __init__(self, capacity: int, policy: str):
        if policy not in POLICIES:
            raise ValueError(f"reuse buffer: policy must be one of {POLICIES}, got {policy!r}")
        if capacity < 1:
            raise ValueError(f"reuse buffer: capacity must be positive, got {capacity}")
        self.capacity = capacity
        self.policy = policy
        self._pages: OrderedDict[int, None] = OrderedDict()  # who leaves first comes first

    def step(self, groups: Iterable[int]) -> tuple[int, int]:
        """One step's choice; returns how many were there, and how many were loaded."""
        wanted = set(groups)
        if len(wanted) > self.capacity:
            raise ValueError(
                f"reuse buffer: capacity must be at least the {len(wanted)} groups of a step, got "
                f"{self.capacity}"
            )
        hits = [group for group in self._pages if group in wanted]
        if self.policy == "lru":
            for group in hits:
                self._pages.move_to_end(group)
        loads = sorted(wanted - self._pages.keys())
        self._make_room(len(loads), wanted)
        self._pages.update(dict.fromkeys(loads))
        if self.policy == "unused":
            for group in self._pages.keys() - wanted:
                del self._pages[group]
        return len(hits), len(loads)

    def _make_room(self, loads: int, wanted: set[int]) -> None:
        leaving = len(self._pages) + loads - self.capacity
        for group in [group for group in self._pages if group not in wanted][: max(0, leaving)]:
            del self._pages[group]


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
    shares = [
        len(now & before) / len(now) for before, now in zip(sets, sets[1:], strict=False) if now
    ]
    return sum(shares) / len(shares) if shares else 0.0
