"""Quest: the box around a group's keys bounds the product that any of them can have."""

from __future__ import annotations

import torch


def group_scores(
    keys: torch.Tensor,
    valid: torch.Tensor,
    query: torch.Tensor,
    group_tokens: int,
    projections: None = None,
    bound_weight: float = 1.0,
) -> torch.Tensor:
    """Sum over heads and channels of q * middle + bound_weight * |q| * half width, of valid tokens.

    With a weight of 1 that is max(q * low, q * high), which no key of the group exceeds. Here one
    choice serves all heads, where the paper has one for each. Arguments as in `Method`.
    """
    boxes = keys.float().unflatten(1, (-1, group_tokens))  # [kv_heads, groups, G, head_dim]
    counts = valid.unflatten(0, (-1, group_tokens))[None, :, :, None]
    low = boxes.masked_fill(~counts, torch.inf).amin(2)[:, None, None]
    high = boxes.masked_fill(~counts, -torch.inf).amax(2)[:, None, None]
    asked = query.float().unflatten(0, (len(keys), -1))[:, :, :, None]  # [kv_heads, g, queries, 1]
    largest = torch.maximum(asked * low, asked * high)
    middles = asked * (low + high) / 2
    scores = bound_weight * largest + (1 - bound_weight) * middles
    bounds = scores.sum((0, 1, -1))  # [queries, groups]
    return bounds.masked_fill(~counts.any(2).flatten(), -torch.inf)
