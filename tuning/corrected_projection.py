"""The projection for queries that are predicted, not known.

Groups are chosen with a prediction p of the query q, made from the input of the layer before
(KVSwap, section 3.3). What must come close to q . k is therefore the product of the projected key
and the projected *prediction*: the best bilinear form p^T M k of rank r. M also corrects what the
prediction gets wrong in the same way each time, and costs nothing at run time, since it is folded
into the query's matrix. Where prediction is exact, M is the query-aware projection.
"""

from __future__ import annotations

import torch

from kvswap_torch.projection import Pair, leading_svd

KEY_RIDGE = 1e-4  # share of the keys' mean variance, so that a factor exists
RIDGE = 0.03  # share of the predictions' mean variance by which M is drawn to "p is q"


def corrected_pair(
    key_moment: torch.Tensor,
    predicted_moment: torch.Tensor,
    cross_moment: torch.Tensor,
    rank: int,
    queries: int,
) -> Pair:
    """The pair with the least expected error of q . k, given p.

    With Lp Lp^T the moment of p and Lk Lk^T that of the centred keys, W = Lp^-1 E[p q^T] Lk =
    U S V^T gives A_q = Lp^-T U S^1/2 and A_k = E[q p^T] Lp^-T U S^-1/2. Directions that few
    queries showed are drawn to M = 1, so that p is taken at its word there.

    Parameters
    ----------
    key_moment
        ``[width, width]`` second moment of the centred keys.
    predicted_moment, cross_moment
        ``[width, width]`` second moment of p, and mean of the outer products of p (rows) and q,
        both summed over the heads of each KV head.
    rank
        Columns, at most ``width``; the first r of them are the pair of rank r.
    queries
        How many the moments were made of.

    Returns
    -------
    tuple
        The key and the query matrix, ``[width, rank]`` fp32.
    """
    width = len(key_moment)
    if not 1 <= rank <= width:
        raise ValueError(f"corrected_pair: rank must be 1 to {width}, got {rank}")
    one = torch.eye(width, dtype=torch.float64)
    drawn = RIDGE * (1 + width / max(1, queries)) * _mean_variance(predicted_moment) * one
    cross = cross_moment.double() + drawn
    query_factor = torch.linalg.cholesky(predicted_moment.double() + drawn)
    raised = key_moment.double() + KEY_RIDGE * _mean_variance(key_moment) * one
    key_factor = torch.linalg.cholesky(raised)
    form = torch.linalg.solve_triangular(query_factor, cross @ key_factor, upper=False)
    left, weights, _ = leading_svd(form.float(), rank)
    weights = weights.double().clamp_min(weights[0].item() * 1e-7 + 1e-30)
    whitened = torch.linalg.solve_triangular(query_factor.T, left.double(), upper=True)
    key = cross.T @ whitened * weights.rsqrt()
    return key.float().contiguous(), (whitened * weights.sqrt()).float().contiguous()


def _mean_variance(moment: torch.Tensor) -> torch.Tensor:
    return moment.diagonal().double().mean().clamp_min(1e-30)
