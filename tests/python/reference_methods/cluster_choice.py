"""DynaKV: which clusters a step reads, by their centroids (2.1, 8.4)."""

from __future__ import annotations

import torch

SCORES = ("sum", "max", "mass")


def cluster_scores(
    centroid: torch.Tensor, size: torch.Tensor, query: torch.Tensor, score: str, scale: float
) -> torch.Tensor:
    """What each cluster is worth to a query: ``[clusters]``.

    Parameters
    ----------
    centroid
        ``[clusters, kv_heads, head_dim]`` fp32.
    size
        ``[clusters]`` tokens.
    query
        ``[heads, head_dim]`` fp32; as many heads to each KV head.
    score
        ``sum`` of heads' products with the centroid; the ``max`` of them; or ``mass``: what heads'
        softmax over all clusters, each counted as often as it has tokens, gives together.
    scale
        Of a product in that softmax.
    """
    if score not in SCORES:
        raise ValueError(f"score: must be one of {', '.join(SCORES)}, got {score!r}")
    asked = query.unflatten(0, (centroid.shape[1], -1))  # [kv_heads, heads of each, head_dim]
    if score == "sum":
        return torch.einsum("ckd,kd->c", centroid, asked.sum(1))
    products = torch.einsum("ckd,kgd->kgc", centroid, asked).flatten(0, 1)  # [heads, clusters]
    if score == "max":
        return products.amax(0)
    return (products * scale + size.log()).softmax(1).sum(0)


def best_within(
    scores: torch.Tensor, costs: torch.Tensor, budgets: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """Clusters in falling score until the first that a budget does not allow.

    Parameters
    ----------
    scores
        ``[clusters]``; of equal ones the lower number is first.
    costs
        ``[kinds, clusters]``: tokens and pages, say.
    budgets
        ``[kinds]``.

    Returns
    -------
    tuple
        Their numbers, the best first; and whether the best one alone costs more than there is,
        which is then the only one, to be read in part.
    """
    order = scores.sort(descending=True, stable=True).indices
    fits = (costs[:, order].cumsum(1) <= budgets[:, None]).all(0)
    count = int(fits.sum())
    is_cut = count == 0 and len(order) > 0
    return order[: max(count, int(is_cut))], is_cut
