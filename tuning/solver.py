"""Settings from tables: the paper's greedy solver, and an exhaustive one beside it.

Pure functions (KVSwap, appendix A.4): what a setting costs in time and memory comes as a cost
model, so that both solvers can be compared, tested without a disk and run again in no time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvswap_torch.config import Solution as TableRow
from kvswap_torch.config import SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import BudgetError
from kvswap_torch.memory_size import format_bytes

if TYPE_CHECKING:
    from kvswap_torch.tuning.costs import SettingCosts


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
    records
        What a record holds: `kvswap_torch.SwapConfig.records`.
    shares_pages
        Do two layers have pages at a time? Each step then reads again all that it attends.
    """

    group_tokens: int
    rank: int
    capacity: int
    records: str = "model"
    shares_pages: bool = False


class Costs(Protocol):
    """Of one batch size and context; seconds are of one decoding step, all layers."""

    def io_seconds(self, setting: Setting) -> float:
        """T_io: loading what the reuse buffer does not hold (A.3)."""

    def model_seconds(self, setting: Setting) -> float:
        """T_model: attention, feed-forward, prediction and management (A.3)."""

    def step_seconds(self, setting: Setting) -> float:
        """Both, loading beside computation as far as it can be."""

    def memory_bytes(self, setting: Setting) -> int:
        """All that a session needs; never less for more rank or capacity."""

    def recall(self, setting: Setting) -> float:
        """What the chosen groups find, 0 to 1: attention mass held and look-ups found, weighed."""


@dataclass(frozen=True)
class Grid:
    """Values to choose from, each rising; the limits G_max and sigma_max are their ends.

    Parameters
    ----------
    exposed_share
        alpha: the share of loading that need not be hidden behind computation, 0 to 1.
    recall_min
        Settings below it are left out.
    records
        Formats of records.
    too_small
        (format, G) of records that the disk would mostly pad.
    shared
        Capacities to try where layers share pages: what is kept beyond a step is of no use there.
    """

    groups: tuple[int, ...]
    ranks: tuple[int, ...]
    capacities: tuple[int, ...]
    exposed_share: float = 0.0
    recall_min: float = 0.0
    records: tuple[str, ...] = ("model",)
    too_small: frozenset[tuple[str, int]] = frozenset()
    shared: tuple[int, ...] = ()

    def kept(self) -> list[tuple[int, bool]]:
        """(capacity, whether layers share pages), to choose from."""
        own = [(capacity, False) for capacity in self.capacities]
        return own + [(capacity, True) for capacity in self.shared]

    def stored(self) -> list[tuple[str, int]]:
        """(format, G) of the records to choose from: the smallest G first."""
        pairs = [(records, group) for group in self.groups for records in self.records]
        return [pair for pair in pairs if pair not in self.too_small]

    def __post_init__(self) -> None:
        for name in ("groups", "ranks", "capacities"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"grid: {name} must be positive and rising, got {values}")
        if not 0 <= self.exposed_share <= 1:
            raise ValueError(f"grid: exposed_share must be 0 to 1, got {self.exposed_share}")
        if not self.stored():
            raise ValueError(f"grid: groups must be usable in a format, got {self.groups}")


@dataclass(frozen=True)
class Solution:
    """A setting and what the cost model says of it.

    Parameters
    ----------
    step_seconds
        Of one decoding step.
    hides
        Whether all but the allowed share of loading is hidden.
    recall
        What the chosen groups find, as `recall` of what was measured.
    """

    setting: Setting
    step_seconds: float
    hides: bool
    memory_bytes: int
    recall: float


def solve_greedy(grid: Grid, costs: Costs, budget_bytes: int) -> Solution:
    """The paper's search: the largest rank, then the smallest G that hides the loading.

    Where not even the largest G does, the next larger reuse buffer is tried, at the largest rank
    that then fits. When rank or buffer come to their end, the fastest setting met is returned.

    The paper limits rank and G instead of asking for a recall. Where one is asked for, a setting
    below it is passed over for the next smaller rank, and only where no setting with pages for each
    layer reaches it do layers share pages.

    Raises
    ------
    BudgetError
        When the smallest rank, buffer and group do not fit, naming the minimum; or when nothing
        that fits reaches the recall asked for, naming the best that does.
    """
    for shares_pages in (False, True):
        met = []
        for capacity in grid.shared if shares_pages else grid.capacities:
            for found in _at_capacity(grid, costs, budget_bytes, (capacity, shares_pages)):
                met.append(found)
                if found.hides:
                    return found
        if met:
            return min(met, key=_preference)
    raise _too_small(grid, costs, budget_bytes)


SPEED_LOSS_MAX = 0.02  # of the fastest step: settings within it are as fast


def solve_exhaustive(grid: Grid, costs: Costs, budget_bytes: int) -> Solution:
    """Of all settings that fit and are within 2 % of the fastest, the one with most rank.

    Of those with as much the fastest, then the least G: a step's time is not known any better, and
    answers want columns.

    Raises
    ------
    BudgetError
        As `solve_greedy`.
    """
    fitting = solutions(grid, costs, budget_bytes)
    good = [found for found in fitting if found.recall >= grid.recall_min]
    if not good:
        raise _too_small(grid, costs, budget_bytes)
    limit = min(found.step_seconds for found in good) * (1 + SPEED_LOSS_MAX)
    fast = [found for found in good if found.step_seconds <= limit]
    return min(fast, key=lambda found: (-found.setting.rank, *_preference(found)))


def solutions(grid: Grid, costs: Costs, budget_bytes: int) -> list[Solution]:
    """All settings of the grid that fit the budget, whatever their recall."""
    settings = (
        Setting(group, rank, capacity, records, shares)
        for (records, group), rank, (capacity, shares) in itertools.product(
            grid.stored(), grid.ranks, grid.kept()
        )
    )
    fitting = (setting for setting in settings if costs.memory_bytes(setting) <= budget_bytes)
    return [_judge(grid, costs, setting) for setting in fitting]


def _at_capacity(
    grid: Grid, costs: Costs, budget_bytes: int, kept: tuple[int, bool]
) -> Iterator[Solution]:
    """For each G, smallest first, the largest rank that fits and finds enough; see `Grid.kept`."""
    capacity, shares_pages = kept
    for records, group in grid.stored():
        for rank in reversed(grid.ranks):
            setting = Setting(group, rank, capacity, records, shares_pages)
            if costs.memory_bytes(setting) > budget_bytes:
                continue
            found = _judge(grid, costs, setting)
            if found.recall >= grid.recall_min:
                yield found
                break


def _judge(grid: Grid, costs: Costs, setting: Setting) -> Solution:
    io, model = costs.io_seconds(setting), costs.model_seconds(setting)
    return Solution(
        setting,
        step_seconds=costs.step_seconds(setting),
        hides=(1 - grid.exposed_share) * io <= model,
        memory_bytes=costs.memory_bytes(setting),
        recall=costs.recall(setting),
    )


def _preference(found: Solution) -> tuple[float, tuple[bool, bool], int, int, int]:
    setting = found.setting
    is_rounded = setting.records != "model"
    wishes = (is_rounded, setting.shares_pages)
    return found.step_seconds, wishes, -setting.rank, setting.group_tokens, setting.capacity


def _too_small(grid: Grid, costs: Costs, budget_bytes: int) -> BudgetError:
    smallest = min(
        (
            Setting(group, grid.ranks[0], capacity, records, shares)
            for records, group in grid.stored()
            for capacity, shares in grid.kept()
        ),
        key=costs.memory_bytes,
    )
    need = costs.memory_bytes(smallest)
    if need <= budget_bytes:
        best = max(found.recall for found in solutions(grid, costs, budget_bytes))
        return BudgetError(
            f"solver: a recall of attention mass of at least {grid.recall_min:.3f} is asked for, "
            f"and settings within {budget_bytes} bytes ({format_bytes(budget_bytes)}) reach "
            f"{best:.3f}; raise the budget, or ask for less"
        )
    return BudgetError(
        f"solver: the smallest setting ({smallest}) needs {need} bytes ({format_bytes(need)}), "
        f"more than the budget of {budget_bytes} ({format_bytes(budget_bytes)}); raise the budget, "
        "or lower context or batch"
    )


def best_of_formats(grid: Grid, costs: Costs, budget_bytes: int) -> dict[str, Solution]:
    """What each format of records would give: its best setting, where one fits."""
    found = {}
    for records in grid.records:
        alone = dataclasses.replace(grid, records=(records,))
        with contextlib.suppress(BudgetError):
            found[records] = solve_exhaustive(alone, costs, budget_bytes)
    return found


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
    greedy, exhaustive
        What each solver finds: where one finds a setting, both do.
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
        """By how much the paper's solver is slower: 0 for as fast, below 0 where it is faster."""
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
        each = {name: run(limited, at, budget_bytes) for name, run in SOLVERS.items()}
        found.append(Solved(at, limited, each["greedy"], each["exhaustive"], each[solver]))
    return found


def make_config(solved: Sequence[Solved], base: SwapConfig) -> SwapConfig:
    """The first pair's solution as the config's own settings, all of them as its table."""
    first = solved[0].costs.config(solved[0].chosen.setting)
    config = base.with_settings(_solved_settings(first))
    rows = []
    for each in solved:
        settings = _solved_settings(each.costs.config(each.chosen.setting))
        own = settings_of(config)
        differing = {path: value for path, value in settings.items() if value != own[path]}
        rows.append(TableRow(each.batch, each.context, tuple(differing.items())))
    rows.sort(key=lambda row: (row.batch, row.context))
    return dataclasses.replace(config, solutions=tuple(rows))


def _solved_settings(config: SwapConfig) -> dict[str, object]:
    settings = settings_of(config)
    paths = (
        *("selection.group_tokens", "summary.rank", "selection.top_k_groups"),
        *("memory.pages_per_layer", "memory.resident_layers", "storage.kv_dtype"),
    )
    return {path: settings[path] for path in paths}
