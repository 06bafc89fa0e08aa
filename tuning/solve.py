"""One solution for each batch and context, by both solvers, and the config that holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvswap_torch.config import Solution as TableRow
from kvswap_torch.config import SwapConfig
from kvswap_torch.tuning.costs import SettingCosts
from kvswap_torch.tuning.solver import Grid, Solution, solutions, solve_exhaustive, solve_greedy

SOLVERS = {"exhaustive": solve_exhaustive, "greedy": solve_greedy}
CONTEXT_MIN = 2048
RECALL_LOSS_MAX = 0.01  # without a limit of the user's: of the best recall that the budget allows


@dataclass(frozen=True)
class Solved:
    """A batch and context with what both solvers say.

    Parameters
    ----------
    grid
        Of values that were tried.
    chosen
        The one that goes into the config.
    """

    costs: SettingCosts
    grid: Grid
    greedy: Solution
    exhaustive: Solution
    chosen: Solution

    @property
    def batch(self) -> int:
        return self.costs.batch

    @property
    def context(self) -> int:
        return self.costs.context

    @property
    def greedy_loss(self) -> float:
        """By how much the paper's solver is slower, 0 for as fast."""
        return self.greedy.step_seconds / self.exhaustive.step_seconds - 1


def pairs_to_solve(batch_max: int, context_max: int) -> list[tuple[int, int]]:
    """Batches 1, 2, 4, .. and contexts down to an eighth, the largest of both first."""
    batches = {batch_max} | {1 << i for i in range(batch_max.bit_length()) if 1 << i <= batch_max}
    contexts = {context_max} | {
        context_max >> i for i in range(1, 4) if context_max >> i >= CONTEXT_MIN
    }
    return [(b, s) for b in sorted(batches, reverse=True) for s in sorted(contexts, reverse=True)]


def solve(
    costs: Callable[[int, int], SettingCosts],
    grids: Callable[[int], Grid],
    pairs: Sequence[tuple[int, int]],
    budget_bytes: int,
    solver: str = "exhaustive",
) -> list[Solved]:
    """Both solvers over every pair.

    Where a grid asks for no recall, settings may lose a little of the best recall that the budget
    allows, so that the fastest one is not also the blindest.

    Raises
    ------
    BudgetError
        When a pair has no solution; names the minimum, or the best recall.
    """
    found = []
    for batch, context in pairs:
        at = costs(batch, context)
        limited = grid = grids(context)
        if grid.recall_min == 0.0:
            fitting = solutions(grid, at, budget_bytes)
            best = max((each.recall for each in fitting), default=0.0)
            limited = dataclasses.replace(grid, recall_min=max(0.0, best - RECALL_LOSS_MAX))
        both = {name: run(limited, at, budget_bytes) for name, run in SOLVERS.items()}
        found.append(Solved(at, limited, both["greedy"], both["exhaustive"], both[solver]))
    return found


def make_config(solved: Sequence[Solved], base: SwapConfig) -> SwapConfig:
    """The first pair's solution as the config's own settings, all of them as its table."""
    first = solved[0].costs.config(solved[0].chosen.setting)
    config = dataclasses.replace(base, **_solved_fields(first))
    rows = []
    for each in solved:
        fields = _solved_fields(each.costs.config(each.chosen.setting))
        differing = {
            name: value for name, value in fields.items() if value != getattr(config, name)
        }
        rows.append(TableRow(each.batch, each.context, tuple(differing.items())))
    rows.sort(key=lambda row: (row.batch, row.context))
    return dataclasses.replace(config, table=tuple(rows))


def _solved_fields(config: SwapConfig) -> dict[str, object]:
    names = ("group_tokens", "rank", "groups_max", "pages_max")
    return {name: getattr(config, name) for name in names}
