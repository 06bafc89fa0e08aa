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
        config.ranks(identity.layers)
        for name in ("true_query_layers", "exact_layers"):
            layers = getattr(config, name)
            if any(layer >= identity.layers for layer in layers):
                raise ConfigError(
                    f"{name}: must be below {identity.layers}, the layers on disk, got "
                    f"{list(layers)}"
                )
    if identity.kv_heads is not None and identity.head_dim is not None:
        width = config.row_heads(identity.kv_heads) * identity.head_dim
        for row in (config, *config.solutions):
            if row.takes_projections:
                checked_rank(row.rank, width)
