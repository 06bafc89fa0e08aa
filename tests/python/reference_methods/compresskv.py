"""CompressKV: a few heads of each layer say which tokens stay, and layers differ in how many."""

from __future__ import annotations

from collections.abc import Sequence


def divide(shares: Sequence[float], average: int, least: int, most: int) -> list[int]:
    """`average` tokens a layer: each has the least, and its share of what is left (3.3).

    What rounding and the bounds leave over or lack, layers give or take one by one, the one with
    the largest share first to take and last to give.
    """
    whole, left = sum(shares), len(shares) * (average - least)
    tokens = [min(most, max(least, least + round(one / whole * left))) for one in shares]
    missing = len(shares) * average - sum(tokens)
    step, bound = (1, most) if missing > 0 else (-1, least)
    order = sorted(range(len(shares)), key=lambda layer: -step * shares[layer])
    while missing:
        for layer in order:
            if missing and tokens[layer] != bound:
                tokens[layer] += step
                missing -= step
    return tokens
