"""ARKV: tokens stay whose attention is high, or differs much from query to query.

Layers whose attention is uneven keep them in the model's dtype, others in e4m3.
"""

from __future__ import annotations

import math

import torch


def token_worth(weights: torch.Tensor, kv_heads: int, variance: float) -> torch.Tensor:
    """What each token is worth (9), summed over KV heads: ``[tokens]``.

    weights: ``[heads, queries, tokens]``, what was paid; mean and variance are over a KV head's
    query heads and the queries.
    """
    of_head = weights.unflatten(0, (kv_heads, -1)).flatten(1, 2)
    mean, square = of_head.mean(1), of_head.square().mean(1)
    return (mean + variance * (square - mean * mean).clamp_min(0)).sum(0)


PAPERS = (7.774380648611771, 5.407015096778621, 5.527702582901318)


def layer_quality(paid: torch.Tensor, temperatures: tuple[float, ...] = PAPERS) -> float:
    """How unevenly tokens were paid, ``[tokens]`` in any unit: (3)-(6).

    0 of fewer than two tokens, and where all are paid alike.
    """
    share = paid.double() / paid.double().sum()
    if len(share) < 2 or not share.isfinite().all():
        return 0.0
    entropy = -torch.special.xlogy(share, share).sum().item()
    apart = share - share.mean()
    variance, fourth = apart.square().mean().item(), apart.pow(4).mean().item()
    if entropy <= 0 or variance <= 1e-12 * share.square().mean().item():
        return 0.0
    of_entropy, of_variance, of_kurtosis = (1 / temperature for temperature in temperatures)
    kurtosis = fourth / variance**2
    return entropy**of_entropy * variance**of_variance * kurtosis**of_kurtosis


def in_dtype_of(ratio: float, tokens: int) -> int:
    """Of a layer's `tokens` those that may stay in the model's dtype (8); ratio: (7)."""
    return math.floor(ratio * tokens + 0.5)
