"""What a calibration sees of one layer while a model reads a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Observed:
    """One layer's queries and keys over one sample, after RoPE.

    Parameters
    ----------
    layer
        Its number among the layers on disk.
    query
        ``[1, heads, tokens, head_dim]``: what it attends with.
    predicted
        ``[1, heads or kv_heads, tokens, head_dim]``: that query as the engine predicts it
        from the layer before; None for layers that choose with their true query.
    keys
        ``[1, kv_heads, tokens, head_dim]``.
    scale
        Of the scores, before the softmax.
    """

    layer: int
    query: torch.Tensor
    predicted: torch.Tensor | None
    keys: torch.Tensor
    scale: float


Observer = Callable[[Observed], None]
"""Called once a layer and sample, in order of the layers; must copy what it keeps."""
