"""CAKE: layers whose attention is spread over many tokens, and changes, keep more of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def token_worth(weights: torch.Tensor, variance: float) -> torch.Tensor:
    """What each token is worth (8), summed over heads: ``[tokens]``.

    weights: ``[heads, queries, tokens]``, what was paid; mean and variance are over queries.
    """
    if weights.shape[1] < 2:
        return weights.mean(1).sum(0)
    return (weights.mean(1) + variance * weights.var(1)).sum(0)


def attention_spread(weights: torch.Tensor) -> tuple[float, float]:
    """How far a layer's attention is spread, and how much it changes from query to query (4.1).

    weights: ``[heads, queries, tokens]``, of the tokens before the window.
    """
    paid = weights.double()
    change = paid.var(1).sum().item() if paid.shape[1] > 1 else 0.0
    return -torch.special.xlogy(paid, paid).sum().item(), change


def preference(dispersion: float, change: float, temperatures: tuple[float, ...]) -> float:
    """(5): 0 where nothing changes."""
    if dispersion <= 0 or change <= 0:
        return 0.0
    return dispersion ** (1 / temperatures[0]) * change ** (1 / temperatures[1])


def divide(preferences: Sequence[float], limits: Sequence[int], total: int) -> list[int]:
    """`total` tokens among layers in proportion to what they are preferred by (4.2).

    A layer has no more than its limit; what it cannot take others have, each as many more. Layers
    come one after the other, and those that are there divide all of it: one that comes leaves none
    of them more than before.
    """
    tokens = list(limits)
    for there in range(1, len(tokens) + 1):
        divided = _divide_once(preferences[:there], limits[:there], total)
        tokens[:there] = map(min, tokens, divided)
    return tokens


def _divide_once(preferences: Sequence[float], limits: Sequence[int], total: int) -> list[int]:
    whole = sum(preferences)
    wanted = [int(one / whole * total) if whole > 0 else 0 for one in preferences]
    tokens = [min(pair) for pair in zip(wanted, limits, strict=True)]
    _add_evenly(tokens, limits, sum(wanted) - sum(tokens))
    _add_evenly(tokens, limits, total - sum(tokens))
    return tokens


def _add_evenly(tokens: list[int], limits: Sequence[int], more: int) -> None:
    below = [layer for layer, limit in enumerate(limits) if tokens[layer] < limit]
    for place, layer in enumerate(below):
        tokens[layer] += more // len(below) + (place < more % len(below))
