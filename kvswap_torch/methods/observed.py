"""SnapKV and PRKV: the tokens that the newest queries paid most attention stay."""

from __future__ import annotations

import torch


def most_attended(
    mass: torch.Tensor, may_stay: torch.Tensor, tokens: int, pool: int, floor: float = 0.0
) -> torch.Tensor:
    """The columns of the `tokens` with most mass, averaged over `pool` neighbours; rising."""
    return by_mass(mass, may_stay, pool, floor)[:tokens].sort().values


def by_mass(
    mass: torch.Tensor, may_stay: torch.Tensor, pool: int, floor: float = 0.0
) -> torch.Tensor:
    """All columns that may stay, those with most mass first, averaged over `pool` neighbours.

    mass: ``[columns]``, the attention that each was paid (SnapKV 4.1, PRKV 3.4); may_stay: bool
    ``[columns]``. Ties go to the lower column; what has no more than `floor` never stays.
    """
    padded = torch.nn.functional.pad(mass, ((pool - 1) // 2, pool // 2))
    pooled = torch.zeros_like(mass)
    for first in range(pool):  # in this order: who has the same neighbours has the same sum
        pooled += padded[first : first + len(mass)]
    candidates = (may_stay & (pooled > floor)).nonzero().flatten()
    return candidates[pooled[candidates].sort(descending=True, stable=True).indices]


def attention_paid(
    keys: torch.Tensor,
    query: torch.Tensor,
    first_column: int,
    log_sum_exp: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What each token is paid, summed over queries, averaged over heads: ``[tokens]``."""
    return attention_weights(keys, query, first_column, log_sum_exp, scale).sum(1).mean(0)


def attention_weights(
    keys: torch.Tensor,
    query: torch.Tensor,
    first_column: int,
    log_sum_exp: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What each query of each head pays each token: ``[heads, queries, tokens]``.

    keys: ``[kv_heads, tokens, head_dim]``; query: ``[heads, queries, head_dim]``, of which query i
    stands at column first_column + i and sees no later one; log_sum_exp: ``[heads, queries]``, of
    all that they attended.
    """
    keys = keys.float().repeat_interleave(len(query) // len(keys), 0)
    scores = query.float() @ keys.transpose(1, 2) * scale
    return (scores - log_sum_exp[..., None]).exp().tril(first_column)
