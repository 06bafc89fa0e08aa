"""The cost model that the solvers ask: time, memory and recall of a setting (A.2 to A.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvswap_torch.config import SwapConfig
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.loading_model import Disk, LayerLoads, LoadingModel, disk_seconds
from kvswap_torch.tuning.solver import Setting
from kvswap_torch.tuning.step_model import StepModel, Work
from kvswap_torch.tuning.traffic import Merging, Traffic, TrafficTable


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
        pages = max(pages, groups, self.base.select_queries_max)
        return dataclasses.replace(
            self.base,
            group_tokens=setting.group_tokens,
            rank=self.levels.ranks[setting.rank],
            groups_max=groups,
            pages_max=pages,
        )

    def attended(self, setting: Setting) -> int:
        """Tokens attended: no more than are kept."""
        return min(self.traffic.choices.tokens, setting.capacity)

    def is_whole(self, setting: Setting) -> bool:
        """Whether the whole context is kept in memory; then all of it is attended."""
        return setting.capacity >= self.context

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
            sealed = max(0, self.context - config.tail_tokens) // config.group_tokens
            traffic = [Traffic(sealed, 0, 0, 0)] * self.shape.layers
        else:
            traffic = self.layer_traffic(config, self._need(setting)["record_bytes"])
        parts = self.steps.parts(make_work(config, self.shape, self.batch, self.context, traffic))
        loads = [
            LayerLoads(self.batch * each.reads, self.batch * each.bytes_read) for each in traffic
        ]
        io = tuple(disk_seconds(self.disk, each) for each in loads)
        period = sum(parts.values()) / self.shape.layers
        ahead = set(self._ahead())
        parts["load"] = sum(self.loading.busy(each) for each in loads)
        parts["wait"] = sum(
            self.loading.waited(seconds, period if layer in ahead else 0.0)
            for layer, seconds in enumerate(io)
        )
        attended = sum(each.attended for each in traffic)
        loaded = sum(each.loads for each in traffic)
        return StepCost(
            parts,
            io,
            bytes_read=sum(each.bytes_read for each in traffic),
            hit_rate=1 - loaded / attended if attended else 0.0,
        )

    def layer_traffic(self, config: SwapConfig, record_bytes: int) -> list[Traffic]:
        """What each layer and sequence reads."""
        merging = Merging(record_bytes, config.merge_gap_bytes, config.merge_bytes_max)
        recorded = self.traffic.choices.tokens // config.group_tokens
        if config.groups_max >= recorded:
            return self.traffic.get(
                config.group_tokens, config.pages_max, config.replacement, self.context, merging
            )
        # Fewer groups with as many pages for each are taken to meet as often.
        share = config.groups_max / recorded
        pages = round(config.pages_max / share)
        traffic = self.traffic.get(
            config.group_tokens, pages, config.replacement, self.context, merging
        )
        return [each.scaled(share) for each in traffic]

    def _ahead(self) -> list[int]:
        return layers_ahead(self.base, self.shape.layers)


def layers_ahead(config: SwapConfig, layers: int) -> list[int]:
    """Layers whose loads are submitted a layer early; the first never is."""
    if not config.look_ahead:
        return []
    return [i for i in range(1, layers) if i not in config.true_query_layers]


def make_work(
    config: SwapConfig, shape: ModelShape, batch: int, context: int, traffic: list[Traffic]
) -> Work:
    """What a step with these settings computes."""
    sealed = max(0, context - config.tail_tokens)
    ranks = config.ranks(shape.layers)
    element = 1 if config.summary_dtype == "int8" else shape.element_bytes
    groups = batch * sum(each.attended for each in traffic)
    beside = config.sink_tokens + config.tail_tokens
    return Work(
        layers=shape.layers,
        batch=batch,
        scanned_bytes=batch * sealed * sum(ranks) * element,
        scanned_tokens=batch * sealed * shape.layers,
        groups=groups,
        attended_tokens=groups * config.group_tokens + batch * shape.layers * beside,
    )
