"""Is a config for the model it is used with?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvswap_torch.config.fields import checked_rank
from kvswap_torch.config.retention import CompressKV
from kvswap_torch.config.solution import ModelIdentity
from kvswap_torch.errors import ConfigError

if TYPE_CHECKING:
    from kvswap_torch.config.swap_config import SwapConfig


def check_model(config: SwapConfig, identity: ModelIdentity) -> None:
    """See `SwapConfig.check_model`."""
    differences = {} if config.model is None else config.model.differences(identity)
    if differences:
        told = ", ".join(f"{n} {ours} (this model: {it})" for n, (ours, it) in differences.items())
        where = f"config {config.source}" if config.source else "config"
        raise ConfigError(
            f"{where}: must be for the model it is used with, but was made for {told}; calibrate "
            "this model, or leave the config out"
        )
    if identity.layers is not None:
        _check_layers(config, identity.layers, identity.heads)
        for row, solution in zip(config.solutions, config.solution_configs, strict=True):
            try:
                _check_layers(solution, identity.layers, identity.heads)
            except ConfigError as error:
                where = f"solutions: batch {row.batch}, context {row.context}"
                raise ConfigError(f"{where}: {error}") from error
    if identity.kv_heads is not None and identity.head_dim is not None:
        width = config.row_heads(identity.kv_heads) * identity.head_dim
        for each in (config, *config.solution_configs):
            if each.takes_projections:
                checked_rank(each.summary.rank, width)


def _check_layers(config: SwapConfig, layers: int, heads: int | None) -> None:
    config.ranks(layers)
    for name, numbers in (
        ("prefetch.skip_layers", config.prefetch.skip_layers),
        ("selection.dense_layers", config.selection.dense_layers),
    ):
        if any(number >= layers for number in numbers):
            raise ConfigError(
                f"{name}: must be below {layers}, the layers on disk, got {list(numbers)}"
            )
    _check_division(config, layers, heads)


def _check_division(config: SwapConfig, layers: int, heads: int | None) -> None:
    """Weights of layers, and heads whose attention is used, belong to a model."""
    policy = config.retention
    if not isinstance(policy, CompressKV):
        return
    weights, scoring = policy.layer_weights, policy.scoring_heads
    if weights and (len(weights) != layers or not any(weights)):
        raise ConfigError(
            f"retention.layer_weights: must be {layers} numbers, one for each layer on disk, one "
            f"of them above 0, got {len(weights)}; read_heads() needs a file of this model"
        )
    if not scoring or heads is None:
        return
    name = "retention.scoring_heads"
    if scoring[-1] >= layers * heads:
        raise ConfigError(
            f"{name}: must be below {layers * heads}, {heads} heads of {layers} layers on disk, "
            f"got {scoring[-1]}; read_heads() needs a file of this model"
        )
    for layer in range(layers):
        if not any(layer * heads <= head < (layer + 1) * heads for head in scoring):
            raise ConfigError(f"{name}: must name a head of each layer, got none of {layer}")
