"""A rank for each layer, under one budget: columns go where they gain most recall per byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvswap_torch.errors import BudgetError
from kvswap_torch.memory_size import format_bytes

Bytes = Callable[[tuple[int, ...]], int]
"""Ranks of all layers -> bytes; more for every column more."""


def hand_out_ranks(
    recall: Sequence[Mapping[int, float]],
    bytes_of: Bytes,
    budget_bytes: int,
    gain_min: float = 0.0,
) -> tuple[int, ...]:
    """Greedily to the layer that gains most attention recall per byte.

    A step may skip ranks: recall often stays flat and then jumps, and a gain per byte over the
    whole jump is what the layer is worth. Steps that gain no more than `gain_min` are not taken, so
    memory may be left over.

    Parameters
    ----------
    recall
        For each layer, rank -> recall of attention mass, 0 to 1.
    bytes_of
        What the whole session needs with these ranks.
    budget_bytes
        Limit of `bytes_of`.

    Raises
    ------
    BudgetError
        When the smallest rank of every layer is too much; names the minimum.
    ValueError
        When there is no layer, or one without a rank.
    """
    if not recall or not all(recall):
        raise ValueError("hand_out_ranks: every layer must have recall of a rank, got none")
    chosen = tuple(min(layer) for layer in recall)
    spent = bytes_of(chosen)
    if spent > budget_bytes:
        raise BudgetError(
            f"hand_out_ranks: ranks {chosen} need {spent} bytes ({format_bytes(spent)}), more than "
            f"the budget of {budget_bytes} ({format_bytes(budget_bytes)}); raise the budget, or "
            "keep fewer pages"
        )
    while True:
        steps = [
            (gain / (cost - spent), -cost, candidate)
            for candidate, gain in _steps(recall, chosen)
            if gain > gain_min and (cost := bytes_of(candidate)) <= budget_bytes
        ]
        if not steps:
            return chosen
        _, cost, chosen = max(steps)
        spent = -cost


def _steps(
    recall: Sequence[Mapping[int, float]], chosen: tuple[int, ...]
) -> list[tuple[tuple[int, ...], float]]:
    """(ranks with one layer raised, what it gains)."""
    return [
        (chosen[:layer] + (rank,) + chosen[layer + 1 :], value - table[chosen[layer]])
        for layer, table in enumerate(recall)
        for rank, value in table.items()
        if rank > chosen[layer]
    ]


def uniform_rank(
    recall: Sequence[Mapping[int, float]], bytes_of: Bytes, budget_bytes: int
) -> tuple[int, ...] | None:
    """The paper's choice: the largest rank that all layers can have; None when none fits."""
    shared = sorted(set.intersection(*(set(layer) for layer in recall)))
    fitting = [(rank,) * len(recall) for rank in shared]
    fitting = [ranks for ranks in fitting if bytes_of(ranks) <= budget_bytes]
    return fitting[-1] if fitting else None
