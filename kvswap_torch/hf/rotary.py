"""Which channels of a head a model turns by position, for projections of pairs of them."""

from __future__ import annotations

import sys

import torch

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.families import ModelParts


def rotary_channels(parts: ModelParts) -> int:
    """How many of a head's channels are turned, the first ones; all, where that is not known."""
    rotary = getattr(parts.decoder, "rotary_emb", None)
    of_kind = f"{parts.kinds[parts.disk[0]]}_inv_freq"  # where kinds of layers turn differently
    speeds = getattr(rotary, "inv_freq", getattr(rotary, of_kind, None))
    head_dim = parts.shape.head_dim
    if parts.latent is not None:
        return head_dim  # not the first ones
    return head_dim if speeds is None else min(head_dim, 2 * speeds.numel())


def check_pairs(config: SwapConfig, parts: ModelParts) -> None:
    """Refuses pairs of channels where a model is known to turn none, or others.

    Raises
    ------
    ConfigError
        Naming the model.
    """
    kinds = {row.summary.projection for row in (config, *config.solution_configs)}
    if "rope_pairs" not in kinds or config.summary.projection_file is not None:
        return
    must = "summary.projection: must be another one than rope_pairs for"
    if getattr(parts.decoder, "rotary_emb", None) is None:
        raise ConfigError(f"{must} {parts.name}, which turns no channels; take channels")
    modeling = sys.modules[type(parts.mixers[parts.disk[0]]).__module__]
    turn = getattr(modeling, "rotate_half", None)
    if turn is not None and turn(torch.arange(4)).tolist() != [-2, -3, 0, 1]:
        raise ConfigError(
            f"{must} {parts.name}, which turns other pairs than i and i + half; take channels"
        )
