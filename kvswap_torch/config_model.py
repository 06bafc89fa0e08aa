"""Is a config for the model it is used with?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvswap_torch.config_parts import ModelIdentity
from kvswap_torch.config_rules import checked_rank
from kvswap_torch.errors import ConfigError

if TYPE_CHECKING:
    from kvswap_torch.config import SwapConfig


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
        for row, solution in zip(config.table, config.solutions, strict=True):
            try:
                _check_layers(solution, identity.layers, identity.heads)
            except ConfigError as error:
                where = f"table: batch {row.batch}, context {row.context}"
                raise ConfigError(f"{where}: {error}") from error
    if identity.kv_heads is not None and identity.head_dim is not None:
        width = config.row_heads(identity.kv_heads) * identity.head_dim
        for row in (config, *config.solutions):
            if row.takes_projections:
                checked_rank(row.rank, width)


def _check_layers(config: SwapConfig, layers: int, heads: int | None) -> None:
    config.ranks(layers)
    for name in ("true_query_layers", "exact_layers"):
        numbers = getattr(config, name)
        if any(number >= layers for number in numbers):
            raise ConfigError(
                f"{name}: must be below {layers}, the layers on disk, got {list(numbers)}"
            )
    _check_division(config, layers, heads)


def _check_division(config: SwapConfig, layers: int, heads: int | None) -> None:
    """What layers are worth, and heads that are asked, belong to a model."""
    shares = config.keep_layer_shares
    if shares and (len(shares) != layers or not any(shares)):
        raise ConfigError(
            f"keep_layer_shares: must be {layers} numbers, one for each layer on disk, one of them "
            f"above 0, got {len(shares)}; read_heads() needs a file of this model"
        )
    asked = config.keep_heads
    if not asked or heads is None:
        return
    if asked[-1] >= layers * heads:
        raise ConfigError(
            f"keep_heads: must be below {layers * heads}, {heads} heads of {layers} layers on "
            f"disk, got {asked[-1]}; read_heads() needs a file of this model"
        )
    for layer in range(layers):
        if not any(layer * heads <= head < (layer + 1) * heads for head in asked):
            raise ConfigError(f"keep_heads: must name a head of each layer, got none of {layer}")
