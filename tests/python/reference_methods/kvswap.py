"""KVSwap: low-rank keys, the heads' products summed, the largest one in a group counts."""

from __future__ import annotations

import torch


def group_scores(
    keys: torch.Tensor,
    valid: torch.Tensor,
    query: torch.Tensor,
    group_tokens: int,
    projections: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """max over a group's valid tokens of (K A_k) . sum over heads of A_q^T q (3.3, equation 1).

    projections: for keys and queries, ``[kv_heads * head_dim, rank]`` each. Other arguments as in
    `Method`; the query's heads may be summed over each GQA group.
    """
    key_projection, query_projection = projections
    rows = keys.float().transpose(0, 1).flatten(1) @ key_projection  # [tokens, rank]
    summed = query.float().unflatten(0, (len(keys), -1)).sum(1)
    asked = summed.transpose(0, 1).flatten(1) @ query_projection  # [queries, rank]
    scores = (asked @ rows.T).masked_fill(~valid, -torch.inf)
    return scores.unflatten(1, (-1, group_tokens)).amax(2)
