"""The cost model that the solvers ask: time, memory and recall of a setting (A.2 to A.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvswap_torch.config import Prefetch, SwapConfig
from kvswap_torch.config.engine import engine_value, renamed
from kvswap_torch.errors import BudgetError
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.layer_time import LayerClock, LayerTime, together
from kvswap_torch.tuning.solver import Setting
from kvswap_torch.tuning.step_model import Disk, LoadingModel, StepModel, Work
from kvswap_torch.tuning.traffic import NO_REUSE, Merging, Prefetched, Traffic, TrafficTable

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
        Seconds by use: what is computed, ``predict`` for queries of later layers and what is scored
        by them, ``load`` for what loads take of the cores, ``wait``.
    layers
        What each layer's reads add.
    bytes_read
        Per sequence.
    hit_rate
        Mean over layers.
    """

    parts: dict[str, float]
    layers: tuple[LayerTime, ...]
    bytes_read: float
    hit_rate: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Replay:
    """Of recorded choices: what `TrafficTable.get` takes, and which part of them is attended."""

    args: tuple[int, int, str, int, Merging]
    share: float


@dataclass
class SettingCosts:
    """Costs of one batch and context; `kvswap_torch.tuning.solver.Costs`.

    Parameters
    ----------
    need
        Config -> bytes by use and ``total`` at this batch and context, and ``record_bytes``.
    losses
        For each layer, rank -> recall that is lost where a predicted query selects; used where
        `base` trusts predictions.
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
    losses: Sequence[Mapping[int, float]] = ()
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

    def with_prefetch(self, prefetch: Prefetch) -> SettingCosts:
        """The same place where queries are predicted in another way."""
        base = dataclasses.replace(self.base, prefetch=prefetch)
        return dataclasses.replace(self, base=base, _needs={}, _costs={})

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
        if self.base.prefetch.mode == "trust":
            lost = (self.losses[layer].get(ranks[layer], 0.0) for layer in self._ahead())
            return (sum(held) - sum(lost)) / len(held)
        return sum(held) / len(held)

    def io_seconds(self, setting: Setting) -> float:
        """Of all layers but the first, which has no layer before it to be hidden behind."""
        return sum(layer.io for layer in self.cost(setting).layers[1:])

    def model_seconds(self, setting: Setting) -> float:
        """What of those loads is hidden: at most as long as what is computed beside them."""
        return sum(layer.io - layer.wait for layer in self.cost(setting).layers[1:])

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
        layers = self._layers(setting, config, parts, traffic)
        parts["load"] = sum(each.load for each in layers)
        parts["wait"] = sum(each.wait for each in layers)
        parts["predict"] = sum(each.predict for each in layers)
        attended = sum(each.attended for each in traffic)
        loaded = sum(each.loads for each in traffic)
        return StepCost(
            parts,
            layers,
            bytes_read=sum(each.bytes_read for each in layers) / self.batch,
            hit_rate=1 - loaded / attended if attended else 0.0,
        )

    def clock(self, parts: Mapping[str, float]) -> LayerClock:
        """What layers' reads take beside a step of these parts, of which none is for reads."""
        selection = self.base.selection
        # By one query a KV head, the mean of its query heads (docs/methods.md).
        share = self.shape.kv_heads / self.shape.heads if selection.score == "mass_sum" else 1.0
        return LayerClock(
            self.loading,
            self.disk,
            self.batch,
            period=sum(parts.values()) / self.shape.layers,
            query=self.steps.predict_seconds(self.batch),
            scoring=share * parts["select"] / self.shape.layers,
        )

    def _layers(
        self,
        setting: Setting,
        config: SwapConfig,
        parts: Mapping[str, float],
        traffic: Sequence[Traffic],
    ) -> tuple[LayerTime, ...]:
        clock, ahead = self.clock(parts), set(self._ahead())
        if self.is_whole(setting):
            return tuple(clock.plain(each) for each in traffic)
        if setting.shares_pages:
            return self._sharing(config, clock, traffic)
        if config.prefetch.mode == "trust":
            return tuple(
                clock.trusted(each) if layer in ahead else clock.plain(each)
                for layer, each in enumerate(traffic)
            )
        prefetched = self._prefetched(config)
        return tuple(
            clock.best_verified(each, prefetched[layer] if layer in ahead else None)
            for layer, each in enumerate(traffic)
        )

    def _sharing(
        self, config: SwapConfig, clock: LayerClock, traffic: Sequence[Traffic]
    ) -> tuple[LayerTime, ...]:
        """Where layers share pages all that is attended is read again.

        A trusted layer reads it one layer ahead. The others read ahead what they attended in the
        last step (csrc/engine/step/step_coordinator.h), and by their own query what that lacks,
        less what a predicted query has found.
        """
        memory = dataclasses.replace(
            config.memory, resident_layers=None, replacement="last_step_only"
        )
        last = dataclasses.replace(config, memory=memory)
        ahead = set(self._ahead())
        is_trusted = config.prefetch.mode == "trust"
        new = self.layer_traffic(last, self._record_bytes(config))
        guesses: Sequence[Prefetched | None] = [None] * len(new)
        if ahead and not is_trusted:
            # As many pages to spare as a step attends: the other layer's.
            pages = max(memory.pages_per_layer, 2 * config.selection.top_k_groups)
            roomy = dataclasses.replace(memory, pages_per_layer=pages)
            guesses = self._prefetched(dataclasses.replace(config, memory=roomy))
        found = []
        for layer, whole in enumerate(traffic):
            if is_trusted and layer in ahead:
                found.append(clock.trusted(whole))
                continue
            guess = guesses[layer] if layer in ahead else None
            found.append(together(clock.early(whole), clock.best_verified(new[layer], guess)))
        return tuple(found)

    def _record_bytes(self, config: SwapConfig) -> int:
        return self.need(config)["record_bytes"]

    def _prefetched(self, config: SwapConfig) -> list[Prefetched | None]:
        """As `layer_traffic`, of layers whose predictions are verified."""
        replay = self._replay(config, self._record_bytes(config))
        found = self.traffic.prefetched(*replay.args)
        return [each and each.scaled(replay.share) for each in found]

    def layer_traffic(self, config: SwapConfig, record_bytes: int) -> list[Traffic]:
        """What each layer and sequence reads."""
        replay = self._replay(config, record_bytes)
        traffic = self.traffic.get(*replay.args)
        return traffic if replay.share == 1.0 else [each.scaled(replay.share) for each in traffic]

    def _replay(self, config: SwapConfig, record_bytes: int) -> _Replay:
        storage, memory, group = config.storage, config.memory, config.selection.group_tokens
        merging = Merging(record_bytes, storage.coalesce_gap_bytes, storage.max_read_bytes)
        recorded = self.traffic.choices.tokens // group
        policy = engine_value(config, "replacement") if memory.resident_layers is None else NO_REUSE
        selected, pages = config.selection.top_k_groups, memory.pages_per_layer
        # Fewer groups with as many pages for each are taken to meet as often.
        share = min(1.0, selected / recorded)
        pages = pages if share == 1.0 else round(pages / share)
        return _Replay((group, pages, policy, self.context, merging), share)

    def _ahead(self) -> list[int]:
        """Layers whose query is predicted, or may be."""
        return layers_ahead(self.base, self.shape.layers)


def layers_ahead(config: SwapConfig, layers: int) -> list[int]:
    """Layers whose query is predicted, or may be; the first never is."""
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
