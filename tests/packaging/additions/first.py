"""A group's first key stands for all of them."""

from __future__ import annotations

import torch


def group_scores(
    keys: torch.Tensor,
    valid: torch.Tensor,
    query: torch.Tensor,
    group_tokens: int,
    projections: None = None,
) -> torch.Tensor:
    """Sum over heads of the product with a group's first key; arguments as in `Method`."""
    first = keys[:, ::group_tokens].float()
    asked = query.float().unflatten(0, (len(keys), -1)).sum(1)
    return torch.einsum("hqd,hgd->qg", asked, first)
