"""ARKV: tokens stay whose attention is high, or differs much from query to query."""

from __future__ import annotations

import torch


def token_worth(weights: torch.Tensor, kv_heads: int, variance: float) -> torch.Tensor:
    """What each token is worth (9), summed over KV heads: ``[tokens]``.

    weights: ``[heads, queries, tokens]``, what was paid; mean and variance are over a KV head's
    query heads and the queries.
    """
    of_head = weights.unflatten(0, (kv_heads, -1)).flatten(1, 2)
    mean, square = of_head.mean(1), of_head.square().mean(1)
    return (mean + variance * (square - mean * mean).clamp_min(0)).sum(0)
