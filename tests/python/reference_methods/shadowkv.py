"""ShadowKV: the mean of a group's keys stands for all of them."""

from __future__ import annotations

import torch


def group_scores(
    keys: torch.Tensor,
    valid: torch.Tensor,
    query: torch.Tensor,
    group_tokens: int,
    projections: None = None,
) -> torch.Tensor:
    """Sum over heads of the product with the mean of a group's valid keys.

    Its landmarks alone; the paper's outliers are kept tokens (`outlier_worth`). Arguments as in
    `Method`.
    """
    counts = valid.unflatten(0, (-1, group_tokens))  # [groups, G]
    grouped = keys.float().unflatten(1, (-1, group_tokens)).masked_fill(~counts[..., None], 0)
    means = grouped.sum(2) / counts.sum(1).clamp_min(1)[:, None]  # [kv_heads, groups, head_dim]
    asked = query.float().unflatten(0, (len(keys), -1)).sum(1)
    scores = torch.einsum("hqd,hgd->qg", asked, means)
    return scores.masked_fill(~counts.any(1), -torch.inf)


def outlier_worth(keys: torch.Tensor, valid: torch.Tensor, group_tokens: int) -> torch.Tensor:
    """How badly the mean of each group's keys stands for them (4.1): ``[groups]``.

    1 minus the least cosine between the mean and one of them, all heads' keys taken as one; 0
    without a valid token. Arguments as in `Method`; keys of whole groups.
    """
    counts = valid.unflatten(0, (-1, group_tokens))  # [groups, G]
    grouped = keys.float().transpose(0, 1).flatten(1).unflatten(0, (-1, group_tokens))
    means = (grouped * counts[..., None]).sum(1) / counts.sum(1).clamp_min(1)[:, None]
    cosines = torch.nn.functional.cosine_similarity(means[:, None], grouped, dim=-1)
    return 1 - cosines.masked_fill(~counts, 1.0).amin(1)
