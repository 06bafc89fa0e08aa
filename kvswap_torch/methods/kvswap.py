"""KVSwap: low-rank keys, the heads' products summed, the largest one in a group counts."""

from __future__ import annotations

import torch

_INT4_MOST = 7
SUMMARY_LEVELS = ("int8", "int4")  # of `SwapConfig.summary_dtype` those of whole numbers


def kept_rows(rows: torch.Tensor, summary_dtype: str) -> torch.Tensor:
    """What a summary of whole numbers keeps of low-rank rows ``[tokens, rank]``: one scale a token.

    int8 is what the cache's own op makes of them, which knows no int4.
    """
    if summary_dtype == "int8":
        from kvswap_torch import ops  # loads the library, which no choice below needs

        numbers, scale = ops.project_keys(
            rows[None, None].contiguous(), torch.eye(rows.shape[1]), torch.int8
        )
        blocks = numbers[0].float() * scale[0][:, None]  # [blocks, rank, 16]
        return blocks.transpose(1, 2).flatten(0, 1)[: len(rows)]
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / _INT4_MOST
    return (rows / scale).round() * scale


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
