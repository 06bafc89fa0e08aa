"""The cost model that the solvers ask: time, memory and recall of a setting (A.2 to A.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.engine import engine_value, renamed
from kvswap_torch.errors import BudgetError
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.solver import Setting
from kvswap_torch.tuning.step_model import (
    Disk,
    LayerLoads,
    LoadingModel,
    StepModel,
    Work,
    disk_seconds,
)
from kvswap_torch.tuning.traffic import NO_REUSE, Merging, Traffic, TrafficTable

SHARING = 2  # layers that have pages at a time, where they are shared: one reads, one attends
GAIN_MIN = 1e-4  # of worth, a column; what a layer gains below it is noise

Bytes = Callable[[tuple[int, ...]], int]
"""Ranks of all layers -> bytes; more for every column more."""


def hand_out_ranks(
    recall: Sequence[Mapping[int, float]],
    bytes_of: Bytes,
    budget_bytes: int,
    gain_min: float = 0.0,
) -> tuple[int, ...]:
    """Greedily to the layer that gains most attention recall per byte.

    A step may skip ranks: recall often stays flat and then jumps, and a gain per byte over the
    whole jump is what the layer is worth. Steps that gain no more than `gain_min` a byte are not
    taken, so memory may be left over.

    Parameters
    ----------
    recall
        For each layer, rank -> recall of attention mass, 0 to 1.
    bytes_of
        What the whole session needs with these ranks.
    budget_bytes
        Limit of `bytes_of`.

    Raises
    ------
    BudgetError
        When the smallest rank of every layer is too much; names the minimum.
    ValueError
        When there is no layer, or one without a rank.
    """
    if not recall or not all(recall):
        raise ValueError("hand_out_ranks: every layer must have recall of a rank, got none")
    chosen = tuple(min(layer) for layer in recall)
    spent = bytes_of(chosen)
    if spent > budget_bytes:
        raise BudgetError(
            f"hand_out_ranks: ranks {chosen} need {spent} bytes ({format_bytes(spent)}), more than "
            f"the budget of {budget_bytes} ({format_bytes(budget_bytes)}); raise the budget, or "
            "keep fewer pages"
        )
    while True:
        steps = [
            (gain / (cost - spent), -cost, candidate)
            for candidate, gain in _steps(recall, chosen)
            if (cost := bytes_of(candidate)) <= budget_bytes and gain > gain_min * (cost - spent)
        ]
        if not steps:
            return chosen
        _, cost, chosen = max(steps)
        spent = -cost


def _steps(
    recall: Sequence[Mapping[int, float]], chosen: tuple[int, ...]
) -> list[tuple[tuple[int, ...], float]]:
    """(ranks with one layer raised, what it gains)."""
    return [
        (chosen[:layer] + (rank,) + chosen[layer + 1 :], value - table[chosen[layer]])
        for layer, table in enumerate(recall)
        for rank, value in table.items()
        if rank > chosen[layer]
    ]


@dataclass(frozen=True)
class Levels:
    """Rank level -> the rank of each layer; levels rise with the memory they take."""

    ranks: Mapping[int, tuple[int, ...]]

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(sorted(self.ranks))


@dataclass(frozen=True)
class StepCost:
    """A step's expected time.

    Parameters
    ----------
    parts
        Seconds by use: what is computed, ``load`` for what loads take of the cores, ``wait``.
    io
        Seconds of the disk for each layer, hidden or not.
    bytes_read
        Per sequence.
    hit_rate
        Mean over layers.
    """

    parts: dict[str, float]
    io: tuple[float, ...]
    bytes_read: float
    hit_rate: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass
class SettingCosts:
    """Costs of one batch and context; `kvswap_torch.tuning.solver.Costs`.

    Parameters
    ----------
    need
        Config -> bytes by use and ``total`` at this batch and context, and ``record_bytes``.
    base
        What every setting shares.
    """

    batch: int
    context: int
    shape: ModelShape
    base: SwapConfig
    levels: Levels
    steps: StepModel
    loading: LoadingModel
    disk: Disk
    traffic: TrafficTable
    need: Callable[[SwapConfig], Mapping[str, int]]
    _needs: dict[Setting, Mapping[str, int]] = field(default_factory=dict)
    _costs: dict[Setting, StepCost] = field(default_factory=dict)

    def config(self, setting: Setting) -> SwapConfig:
        """The settings of a cache."""
        if self.is_whole(setting):
            groups = pages = -(-self.context // setting.group_tokens)
        else:
            groups = max(1, self.attended(setting) // setting.group_tokens)
            pages = setting.capacity // setting.group_tokens
        pages = max(pages, groups, self.base.selection.max_step_tokens)
        _, kv_dtype = renamed("records", setting.records)
        return self.base.with_settings(
            {
                "selection.group_tokens": setting.group_tokens,
                "summary.rank": self.levels.ranks[setting.rank],
                "selection.top_k_groups": groups,
                "memory.pages_per_layer": pages,
                "memory.resident_layers": SHARING if setting.shares_pages else None,
                "storage.kv_dtype": kv_dtype,
            }
        )

    def attended(self, setting: Setting) -> int:
        """Tokens attended: no more than are kept."""
        return min(self.traffic.choices.tokens, setting.capacity)

    def is_whole(self, setting: Setting) -> bool:
        """Whether the whole context is kept in memory; then all of it is attended."""
        return setting.capacity >= self.context and not setting.shares_pages

    def memory_bytes(self, setting: Setting) -> int:
        return self._need(setting)["total"]

    def _need(self, setting: Setting) -> Mapping[str, int]:
        if setting not in self._needs:
            self._needs[setting] = self.need(self.config(setting))
        return self._needs[setting]

    def recall(self, setting: Setting) -> float:
        if self.is_whole(setting):
            return 1.0
        choices = self.traffic.choices
        tables = choices.recall_of(setting.group_tokens, self.attended(setting))
        ranks = self.levels.ranks[setting.rank]
        held = [table[rank] for table, rank in zip(tables, ranks, strict=True)]
        return sum(held) / len(held)

    def io_seconds(self, setting: Setting) -> float:
        """Of the layers that read ahead: the others' loads cannot be hidden by any setting."""
        io = self.cost(setting).io
        return sum(io[layer] for layer in self._ahead())

    def model_seconds(self, setting: Setting) -> float:
        """The time beside which those loads can be hidden."""
        parts = self.cost(setting).parts
        own = sum(seconds for name, seconds in parts.items() if name != "wait")
        return own * len(self._ahead()) / self.shape.layers

    def step_seconds(self, setting: Setting) -> float:
        return self.cost(setting).seconds

    def cost(self, setting: Setting) -> StepCost:
        """The whole account of a setting's step."""
        if setting not in self._costs:
            self._costs[setting] = self._cost(setting)
        return self._costs[setting]

    def _cost(self, setting: Setting) -> StepCost:
        config = self.config(setting)
        if self.is_whole(setting):
            sealed = max(0, self.context - config.selection.recent_tokens)
            sealed //= config.selection.group_tokens
            traffic = [Traffic(sealed, 0, 0, 0)] * self.shape.layers
        else:
            traffic = self.layer_traffic(config, self._need(setting)["record_bytes"])
        parts = self.steps.parts(make_work(config, self.shape, self.batch, self.context, traffic))
        loads = [self._loads(each) for each in traffic]
        io = tuple(disk_seconds(self.disk, each) for each in loads)
        period = sum(parts.values()) / self.shape.layers
        ahead = set(self._ahead())
        late = self._late(setting, config) if setting.shares_pages else {}
        every = [*loads, *late.values()]
        parts["load"] = sum(self.loading.busy(each) for each in every)
        parts["wait"] = sum(
            self.loading.waited(seconds, period if layer in ahead or late else 0.0)
            for layer, seconds in enumerate(io)
        )
        parts["wait"] += sum(
            self.loading.waited(disk_seconds(self.disk, each), 0.0) for each in late.values()
        )
        attended = sum(each.attended for each in traffic)
        loaded = sum(each.loads for each in traffic)
        return StepCost(
            parts,
            io,
            bytes_read=sum(each.bytes_read for each in every) / self.batch,
            hit_rate=1 - loaded / attended if attended else 0.0,
        )

    def _loads(self, traffic: Traffic) -> LayerLoads:
        return LayerLoads(self.batch * traffic.reads, self.batch * traffic.bytes_read)

    def _late(self, setting: Setting, config: SwapConfig) -> dict[int, LayerLoads]:
        """Where layers share pages: what those that do not read ahead read by their own query.

        What they attended in the last step they read beforehand (csrc/engine/layer_steps.h); this
        is what it lacks.
        """
        memory = dataclasses.replace(
            config.memory, resident_layers=None, replacement="last_step_only"
        )
        last = dataclasses.replace(config, memory=memory)
        new = self.layer_traffic(last, self._need(setting)["record_bytes"])
        ahead = set(self._ahead())
        return {layer: self._loads(each) for layer, each in enumerate(new) if layer not in ahead}

    def layer_traffic(self, config: SwapConfig, record_bytes: int) -> list[Traffic]:
        """What each layer and sequence reads."""
        storage, memory, group = config.storage, config.memory, config.selection.group_tokens
        merging = Merging(record_bytes, storage.coalesce_gap_bytes, storage.max_read_bytes)
        recorded = self.traffic.choices.tokens // group
        policy = engine_value(config, "replacement") if memory.resident_layers is None else NO_REUSE
        selected, pages = config.selection.top_k_groups, memory.pages_per_layer
        if selected >= recorded:
            return self.traffic.get(group, pages, policy, self.context, merging)
        # Fewer groups with as many pages for each are taken to meet as often.
        share = selected / recorded
        pages = round(pages / share)
        traffic = self.traffic.get(group, pages, policy, self.context, merging)
        return [each.scaled(share) for each in traffic]

    def _ahead(self) -> list[int]:
        return layers_ahead(self.base, self.shape.layers)


def layers_ahead(config: SwapConfig, layers: int) -> list[int]:
    """Layers whose loads are submitted a layer early; the first never is."""
    if not config.predicts:
        return []
    return [i for i in range(1, layers) if i not in config.prefetch.skip_layers]


def make_work(
    config: SwapConfig, shape: ModelShape, batch: int, context: int, traffic: list[Traffic]
) -> Work:
    """What a step with these settings computes."""
    sealed = max(0, context - config.selection.recent_tokens)
    ranks = config.ranks(shape.layers)
    element = {"int8": 1, "int4": 0.5}.get(config.summary.dtype, shape.element_bytes)
    groups = batch * sum(each.attended for each in traffic)
    beside = config.selection.sink_tokens + config.selection.recent_tokens
    return Work(
        layers=shape.layers,
        batch=batch,
        scanned_bytes=batch * sealed * sum(ranks) * element,
        scanned_tokens=batch * sealed * shape.layers,
        groups=groups,
        attended_tokens=groups * config.selection.group_tokens + batch * shape.layers * beside,
    )


def make_levels(recall: Sequence[Mapping[int, float]], *, uniform: bool = False) -> Levels:
    """A level r gives out r columns a layer on average, to the layers that gain most by them.

    What is left when none gains goes to the layers with the fewest: calibration text shows what
    it asks for, and another text asks for something else (with 8 columns where calibration saw no
    use for more, answers of a real model were lost that a smaller budget's 17 kept). Levels that
    give the same ranks as a smaller one are left out.

    Parameters
    ----------
    recall
        For each layer, rank -> recall of attention mass; all layers the same ranks.
    uniform
        The paper's way: r columns to every layer.
    """
    found: dict[int, tuple[int, ...]] = {}
    for rank in sorted(recall[0]):
        budget = rank * len(recall)
        ranks = (rank,) * len(recall)
        if not uniform:
            ranks = _filled(
                hand_out_ranks(recall, sum, budget, GAIN_MIN), sorted(recall[0]), budget
            )
        if ranks not in found.values():
            found[rank] = ranks
    return Levels(found)


def _filled(ranks: tuple[int, ...], grid: Sequence[int], columns: int) -> tuple[int, ...]:
    """At most so many columns: the layer with the fewest, the first of several, gets more."""
    filled = list(ranks)
    while True:
        layer = min(range(len(filled)), key=lambda each: (filled[each], each))
        more = next((rank for rank in grid if rank > filled[layer]), None)
        if more is None or sum(filled) + more - filled[layer] > columns:
            return tuple(filled)
        filled[layer] = more
