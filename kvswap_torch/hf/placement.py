"""Which part of a model this process has, where several run one model together.

transformers splits a model over the processes of ``torchrun`` by its own ``DistributedConfig``:
*tensor parallel* gives each process some heads of every layer, *pipeline parallel* some layers. A
cache then keeps just this process's heads and layers on this process's disk.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from kvswap_torch.config import CAKE, SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import ConfigError, UnsupportedModelError
from kvswap_torch.projection import Pair


@dataclass(frozen=True)
class Placement:
    """Where this process stands among those that run one model.

    Parameters
    ----------
    rank, world
        This process's number, and how many there are.
    head_rank, head_ranks
        Its part of every layer's heads (tensor parallel), and of how many.
    stage, stages
        Its part of the layers (pipeline parallel), and of how many.
    heads, kv_heads
        Heads of the whole model; of this process: `local_heads`.
    heads_split, kv_split
        Whether the attention heads and the key-value heads are split over the head ranks at all:
        some plans leave them whole, and a latent is one key-value head, of which each has all.
    first_layer, last_layer
        Its layers, ``[first, last)``, by their numbers in the model.
    """

    rank: int = 0
    world: int = 1
    head_rank: int = 0
    head_ranks: int = 1
    stage: int = 0
    stages: int = 1
    heads: int = 0
    kv_heads: int = 0
    heads_split: bool = False
    kv_split: bool = False
    first_layer: int = 0
    last_layer: int = 1 << 30

    @property
    def is_shared(self) -> bool:
        return self.world > 1

    def has_layer(self, index: int) -> bool:
        return self.first_layer <= index < self.last_layer

    def local_heads(self) -> tuple[int, int]:
        """Attention heads and key-value heads of this process."""
        heads = self.heads // (self.head_ranks if self.heads_split else 1)
        return heads, self.kv_heads // (self.head_ranks if self.kv_split else 1)

    def __str__(self) -> str:
        heads = f", heads {self.head_rank + 1} of {self.head_ranks}" if self.head_ranks > 1 else ""
        stage = (
            f", layers {self.first_layer} to {self.last_layer - 1}, stage {self.stage + 1} of "
            f"{self.stages}"
            if self.stages > 1
            else ""
        )
        return f"rank {self.rank} of {self.world}{heads}{stage}"


def placement_of(
    model: Any, heads: int, kv_heads: int, disk: tuple[int, ...], *, latent: bool = False
) -> Placement:
    """Where this process stands, from how transformers has split `model`.

    Parameters
    ----------
    model
        The outermost model.
    heads, kv_heads
        Of the whole model.
    disk
        Numbers of all layers that would go to disk, of all processes.
    latent
        Its layers cache latents, which all heads share.

    Raises
    ------
    UnsupportedModelError
        The same on every rank: heads that cannot be split evenly, a stage without a layer for the
        disk, experts or data split over processes.
    """
    config = getattr(model.config, "distributed_config", None)
    if config is None or not torch.distributed.is_available():
        return Placement(heads=heads, kv_heads=kv_heads)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return Placement(heads=heads, kv_heads=kv_heads)
    name = type(model).__name__
    _refuse_other_splits(name, config)
    if latent:
        heads_split, kv_split = _are_latent_heads_split(name, model, config.tp_size, heads), False
    else:
        heads_split = kv_split = _is_kv_split(name, model, config.tp_size, heads, kv_heads)
    first, last, stage = 0, 1 << 30, getattr(model, "_pp_stage", None)
    if stage is not None:
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        ranges = [stage.layer_range_for_rank(i, layers) for i in range(stage.pp_size)]
        _refuse_empty_stages(name, ranges, disk)
        first, last = ranges[stage.pp_rank]
    mesh = model._mesh_manager.get_mesh("tp") if config.tp_size > 1 else None
    return Placement(
        rank=torch.distributed.get_rank(),
        world=torch.distributed.get_world_size(),
        head_rank=0 if mesh is None else mesh.get_local_rank(),
        head_ranks=config.tp_size,
        stage=0 if stage is None else stage.pp_rank,
        stages=config.pp_size,
        heads=heads,
        kv_heads=kv_heads,
        heads_split=heads_split,
        kv_split=kv_split,
        first_layer=first,
        last_layer=last,
    )


def _refuse_other_splits(name: str, config: Any) -> None:
    for kind, size in (("experts", config.ep_size), ("data or weights (FSDP)", config.dp_size)):
        if size > 1:
            raise UnsupportedModelError(
                f"KVSwapCache: {name} splits {kind} over {size} processes; heads (tp_size) and "
                "layers (pp_size) may be split"
            )


def _is_kv_split(name: str, model: Any, ranks: int, heads: int, kv_heads: int) -> bool:
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    if ranks == 1:
        return False
    each = get_kv_heads_per_rank(model.tp_plan, kv_heads, ranks)
    if each == kv_heads:
        return False  # gathered: every process has all heads
    if each is None or heads % ranks:
        raise UnsupportedModelError(
            f"KVSwapCache: {name} has {heads} heads and {kv_heads} key-value heads, which cannot "
            f"be split evenly over {ranks} processes; load it with a tp_size that divides both"
        )
    return True


def _are_latent_heads_split(name: str, model: Any, ranks: int, heads: int) -> bool:
    """By the layer that expands latents to heads: some plans leave all of attention whole."""
    split = any(
        key.rsplit(".", 1)[-1] == "kv_b_proj" and style == "colwise"
        for key, style in model.tp_plan.items()
    )
    if ranks == 1 or not split:
        return False
    if heads % ranks:
        raise UnsupportedModelError(
            f"KVSwapCache: {name} has {heads} heads over latents, which cannot be split evenly "
            f"over {ranks} processes; load it with a tp_size that divides them"
        )
    return True


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """What this process has of it, where heads are split over several."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach()


def _refuse_empty_stages(name: str, ranges: list[tuple[int, int]], disk: tuple[int, ...]) -> None:
    for number, (first, last) in enumerate(ranges):
        if not any(first <= layer < last for layer in disk):
            raise UnsupportedModelError(
                f"KVSwapCache: {name} has no full-attention layer among layers {first} to "
                f"{last - 1}, which are stage {number + 1} of {len(ranges)}; layers that go to "
                f"disk are {', '.join(map(str, disk))}: load it with a smaller pp_size"
            )


def local_config(config: SwapConfig, disk: tuple[int, ...], placement: Placement) -> SwapConfig:
    """A whole model's config as this process uses it: its layers' ranks, numbered from its own.

    Parameters
    ----------
    config
        Checked against the whole model.
    disk
        Numbers of all layers that go to disk, of all processes.
    """
    _check_division(config, placement)
    mine = [number for number, layer in enumerate(disk) if placement.has_layer(layer)]
    if len(mine) == len(disk):
        return config

    of_layers = ("prefetch.skip_layers", "selection.dense_layers")

    def of(settings: dict[str, Any]) -> dict[str, Any]:
        rank = settings.get("summary.rank")
        changed = {}
        if isinstance(rank, list | tuple):
            changed["summary.rank"] = tuple(rank[number] for number in mine)
        for name in of_layers:
            if name in settings:
                changed[name] = tuple(mine.index(n) for n in settings[name] if n in mine)
        return changed

    solutions = tuple(
        dataclasses.replace(row, settings=dict(row.settings) | of(dict(row.settings)))
        for row in config.solutions
    )
    plain = dataclasses.replace(config, solutions=())
    return dataclasses.replace(plain.with_settings(of(settings_of(config))), solutions=solutions)


def _check_division(config: SwapConfig, placement: Placement) -> None:
    """Tokens are divided among all layers by all heads, which one process must have."""
    settings = settings_of(config)
    divides = ("retention.layer_weights", "retention.scoring_heads")
    named = [name for name in divides if settings.get(name)]
    named += ["retention.policy=cake"] if isinstance(config.retention, CAKE) else []
    if named and (placement.stages > 1 or placement.head_ranks > 1):
        raise ConfigError(
            f"{named[0]}: must be left out where several processes run one model, since tokens are "
            f"divided among all of its layers, got {placement}; snapkv keeps as many in each"
        )


def local_projections(pairs: list[Pair], disk: tuple[int, ...], placement: Placement) -> list[Pair]:
    """A whole model's projections as this process uses them: its layers' and its heads' rows.

    Its groups are chosen for its own heads, which may differ from those that one process would
    choose for all.
    """
    mine = [pair for pair, layer in zip(pairs, disk, strict=True) if placement.has_layer(layer)]
    if not placement.kv_split:
        return mine
    return [_rows_of(pair, placement) for pair in mine]


def _rows_of(pair: Pair, placement: Placement) -> Pair:
    rows = pair[0].shape[0] // placement.head_ranks
    part = slice(placement.head_rank * rows, (placement.head_rank + 1) * rows)
    keys, queries = (matrix[part].contiguous() for matrix in pair)
    if keys.shape[1] <= rows:
        return keys, queries
    # More columns than these heads are wide: the same product from as many as they are wide.
    left, weights, right = torch.linalg.svd(keys @ queries.T, full_matrices=False)
    root = weights.sqrt()
    return left * root, right.T * root
