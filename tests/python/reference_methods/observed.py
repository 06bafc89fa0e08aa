"""SnapKV and PRKV: the tokens that the newest queries paid most attention stay."""

from __future__ import annotations

import torch


def most_attended(
    mass: torch.Tensor, may_stay: torch.Tensor, tokens: int, pool: int, floor: float = 0.0
) -> torch.Tensor:
    """The positions of the `tokens` with most mass, averaged over `pool` neighbours; rising."""
    return by_mass(mass, may_stay, pool, floor)[:tokens].sort().values


def by_mass(
    mass: torch.Tensor, may_stay: torch.Tensor, pool: int, floor: float = 0.0
) -> torch.Tensor:
    """All positions that may stay, those with most mass first, averaged over `pool` neighbours.

    mass: ``[positions]``, the attention that each was paid (SnapKV 4.1, PRKV 3.4); may_stay: bool
    ``[positions]``. Ties go to the lower position; what has no more than `floor` never stays.
    """
    padded = torch.nn.functional.pad(mass, ((pool - 1) // 2, pool // 2))
    pooled = torch.zeros_like(mass)
    for first in range(pool):  # in this order: who has the same neighbours has the same sum
        pooled += padded[first : first + len(mass)]
    candidates = (may_stay & (pooled > floor)).nonzero().flatten()
    return candidates[pooled[candidates].sort(descending=True, stable=True).indices]


def agreement(weights: torch.Tensor, k: int) -> float:
    """On how many of their k best tokens a window's first and last query agree (PRKV (4)).

    weights: ``[heads, queries, tokens]``; the mean over heads. Ties go to the lower position.
    """
    agreed = 0
    for of_head in weights:
        first, last = (
            set(of_head[query].sort(descending=True, stable=True).indices[:k].tolist())
            for query in (0, -1)
        )
        agreed += len(first & last)
    return agreed / len(weights)


def log_sum_exp(
    keys: torch.Tensor,
    valid: torch.Tensor,
    query: torch.Tensor,
    first_position: int,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Of all products of each query with the tokens that it sees: ``[heads, queries]``.

    valid: bool ``[tokens]``; the others as `attention_weights`.
    """
    scores = _scores(keys, query, scale, softcap)
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril(first_position) & valid
    return scores.masked_fill(~seen, -torch.inf).logsumexp(-1)


def _scores(keys: torch.Tensor, query: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    keys = keys.float().repeat_interleave(len(query) // len(keys), 0)
    scores = query.float() @ keys.transpose(1, 2) * scale
    return softcap * (scores / softcap).tanh() if softcap else scores


def attention_weights(
    keys: torch.Tensor,
    query: torch.Tensor,
    first_position: int,
    log_sum_exp: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """What each query of each head pays each token: ``[heads, queries, tokens]``.

    keys: ``[kv_heads, tokens, head_dim]``; query: ``[heads, queries, head_dim]``, of which query i
    stands at first_position + i and sees no later one; log_sum_exp: ``[heads, queries]``, of all
    that they attended; softcap: scores become softcap * tanh(score / softcap).
    """
    scores = _scores(keys, query, scale, softcap)
    return (scores - log_sum_exp[..., None]).exp().tril(first_position)
