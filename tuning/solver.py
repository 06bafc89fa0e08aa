"""Settings from tables: the paper's greedy solver, and an exhaustive one beside it.

Pure functions (KVSwap, appendix A.4): what a setting costs in time and memory comes as a cost
model, so that both solvers can be compared, tested without a disk and run again in no time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvswap_torch.errors import BudgetError
from kvswap_torch.memory_size import format_bytes


@dataclass(frozen=True, order=True)
class Setting:
    """What the solver decides.

    Parameters
    ----------
    group_tokens
        G.
    rank
        Columns of the summary: one number, the level that a rank for each layer is derived from.
    capacity
        C: tokens kept in memory per layer and sequence, at least those that a step attends.
    """

    group_tokens: int
    rank: int
    capacity: int


class Costs(Protocol):
    """Of one batch size and context; seconds are of one layer's step."""

    def io_seconds(self, group_tokens: int, capacity: int) -> float:
        """T_io: loading what the reuse buffer does not hold (A.3)."""

    def model_seconds(self, rank: int, capacity: int) -> float:
        """T_model: attention, feed-forward, prediction and management (A.3)."""

    def memory_bytes(self, setting: Setting) -> int:
        """All that a session needs; never less for more rank or capacity."""


@dataclass(frozen=True)
class Grid:
    """Values to choose from, each rising; the limits G_max and sigma_max are their ends.

    Parameters
    ----------
    exposed_share
        alpha: the share of loading that need not be hidden behind computation, 0 to 1.
    """

    groups: tuple[int, ...]
    ranks: tuple[int, ...]
    capacities: tuple[int, ...]
    exposed_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("groups", "ranks", "capacities"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"grid: {name} must be positive and rising, got {values}")
        if not 0 <= self.exposed_share <= 1:
            raise ValueError(f"grid: exposed_share must be 0 to 1, got {self.exposed_share}")


@dataclass(frozen=True)
class Solution:
    """A setting and what the cost model says of it.

    Parameters
    ----------
    step_seconds
        Of one layer, with loading beside computation: the longer of the two.
    hides
        Whether all but the allowed share of loading is hidden.
    """

    setting: Setting
    step_seconds: float
    hides: bool
    memory_bytes: int


def solve_greedy(grid: Grid, costs: Costs, budget_bytes: int) -> Solution:
    """The paper's search: the largest rank, then the smallest G that hides the loading.

    Where not even the largest G does, the next larger reuse buffer is tried, at the largest rank
    that then fits. When rank or buffer come to their end, the fastest setting met is returned.

    Raises
    ------
    BudgetError
        When the smallest rank, buffer and group do not fit; names the minimum.
    """
    met = []
    for capacity in grid.capacities:
        for found in _at_capacity(grid, costs, budget_bytes, capacity):
            met.append(found)
            if found.hides:
                return found
    if not met:
        raise _too_small(grid, costs, budget_bytes)
    return min(met, key=_preference)


def solve_exhaustive(grid: Grid, costs: Costs, budget_bytes: int) -> Solution:
    """The fastest setting of all that fit; of equally fast ones that with most rank, then least G.

    Raises
    ------
    BudgetError
        As `solve_greedy`.
    """
    settings = itertools.starmap(
        Setting, itertools.product(grid.groups, grid.ranks, grid.capacities)
    )
    fitting = [
        found
        for setting in settings
        if (found := _judge(grid, costs, setting)).memory_bytes <= budget_bytes
    ]
    if not fitting:
        raise _too_small(grid, costs, budget_bytes)
    return min(fitting, key=_preference)


def _at_capacity(grid: Grid, costs: Costs, budget_bytes: int, capacity: int) -> Iterator[Solution]:
    """For each G, smallest first, the solution with the largest rank that fits."""
    for group in grid.groups:
        for rank in reversed(grid.ranks):
            found = _judge(grid, costs, Setting(group, rank, capacity))
            if found.memory_bytes <= budget_bytes:
                yield found
                break


def _judge(grid: Grid, costs: Costs, setting: Setting) -> Solution:
    io = costs.io_seconds(setting.group_tokens, setting.capacity)
    model = costs.model_seconds(setting.rank, setting.capacity)
    return Solution(
        setting,
        step_seconds=max(io, model),
        hides=(1 - grid.exposed_share) * io <= model,
        memory_bytes=costs.memory_bytes(setting),
    )


def _preference(found: Solution) -> tuple[float, int, int, int]:
    setting = found.setting
    return found.step_seconds, -setting.rank, setting.group_tokens, setting.capacity


def _too_small(grid: Grid, costs: Costs, budget_bytes: int) -> BudgetError:
    smallest = min(
        (Setting(group, grid.ranks[0], grid.capacities[0]) for group in grid.groups),
        key=costs.memory_bytes,
    )
    need = costs.memory_bytes(smallest)
    return BudgetError(
        f"solver: the smallest setting ({smallest}) needs {need} bytes ({format_bytes(need)}), "
        f"more than the budget of {budget_bytes} ({format_bytes(budget_bytes)}); raise the budget, "
        "or lower context or batch"
    )
