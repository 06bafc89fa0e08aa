"""Second moments of one layer's keys and queries, gathered in bounded memory.

Groups are chosen with a prediction p of the query q, made from the input of the layer before
(KVSwap, section 3.3). What must come close to q . k is therefore the product of the projected key
and the projected *prediction*: the best bilinear form p^T M k of rank r. M also corrects what the
prediction gets wrong in the same way each time, and costs nothing at run time, since it is folded
into the query's matrix. Where prediction is exact, M is the query-aware projection.
"""

from __future__ import annotations

import torch

from kvswap_torch.projection import (
    Pair,
    flat_tokens,
    head_moment,
    leading_svd,
    pair_from_moments,
    sum_over_heads,
)
from kvswap_torch.tuning.look_ups import look_up_mass, sources
from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.samples import Sample

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


PIECE_TOKENS = 512  # a piece in fp32 stays small beside the moments
READ_SHARE = 0.1  # weight of the queries of tokens that are only read
LOOK_UPS_WEIGHT = 200  # of a query that looks up with all its mass, where another one weighs 1


class LayerMoments:
    """Streaming moments of one layer (KVSwap, appendix A.1).

    Two fp32 matrices ``[width, width]`` and a few vectors, whatever the text's length: 8 MiB for 8
    KV heads of 128. Keys are moved by their first chunk's mean, so that centring them at the end
    loses no digits. Where groups are scored by a sum over heads, queries are summed over the heads
    of each KV head; otherwise each head counts for itself.

    Keys are those of all tokens, but queries mostly those of tokens in focus: only they choose.
    Queries of tokens that are merely read keep a small share, so that no direction is lost that
    another text may need. Where each head counts for itself, those count most that look something
    up (`kvswap_torch.tuning.look_ups`), by the mass they look up with: few heads of few layers
    retrieve, and columns are theirs (docs/choosing.md has what it brings).
    """

    def __init__(self, width: int, score: str = "sum"):
        self.width = width
        self.score = score
        self.keys = 0
        self.queries = 0
        self._weight = 0.0
        self._origin: torch.Tensor | None = None
        self._key_sum = torch.zeros(width)
        # Both moments are symmetric: above the diagonal that of keys, below it that of predictions.
        self._squares = torch.zeros(width, width)
        self._key_diagonal = torch.zeros(width)
        self._predicted_diagonal = torch.zeros(width)
        self._cross = torch.zeros(width, width)

    def add(self, seen: Observed, sample: Sample) -> None:
        """Counts one layer's sample; tokens in focus choose with what they look for."""
        focus = sample.focus
        self._add_keys(seen.keys)
        self._add_queries(seen, slice(0, focus), READ_SHARE)
        self._add_queries(seen, slice(focus, None), 1.0 - READ_SHARE, self._weights(seen, sample))
        self._weight += 1.0
        self.queries += seen.query.shape[2] - focus

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return 2 * self._squares.nbytes + 4 * self._key_sum.nbytes

    def _add_keys(self, keys: torch.Tensor) -> None:
        """keys: ``[1, kv_heads, tokens, head_dim]`` after RoPE."""
        for piece in keys.split(PIECE_TOKENS, dim=2):
            rows = flat_tokens(piece).float()
            if self._origin is None:
                self._origin = rows.mean(0)
            rows = rows - self._origin
            square = rows.T @ rows
            self._squares += square.triu(1)
            self._key_diagonal += square.diagonal()
            self._key_sum += rows.sum(0)
            self.keys += len(rows)

    def _weights(self, seen: Observed, sample: Sample) -> torch.Tensor | None:
        """Of each head's queries in focus, ``[heads, queries]``, mean 1; None: all alike."""
        if self.score == "sum":
            return None
        positions = torch.arange(sample.focus, len(sample.ids))
        mass = look_up_mass(seen, positions, sources(sample.ids, positions))
        weights = 1 + LOOK_UPS_WEIGHT * mass
        return weights / weights.mean()

    def _add_queries(
        self, seen: Observed, tokens: slice, share: float, weights: torch.Tensor | None = None
    ) -> None:
        kv_heads = seen.keys.shape[1]
        query = seen.query[:, :, tokens]
        predicted = query if seen.predicted is None else seen.predicted[:, :, tokens]
        weight = share / query.shape[2]
        for first in range(0, query.shape[2], PIECE_TOKENS):
            piece = slice(first, first + PIECE_TOKENS)
            true, guess = query[:, :, piece], predicted[:, :, piece]
            left = guess if weights is None else guess.float() * weights[None, :, piece, None]
            square = self._products(left, guess, kv_heads) * weight
            self._squares += square.tril(-1)
            self._predicted_diagonal += square.diagonal()
            self._cross += self._products(left, true, kv_heads) * weight

    def _products(self, left: torch.Tensor, right: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Outer products of queries ``[1, heads, tokens, head_dim]``, summed over tokens."""
        if self.score == "sum":
            return sum_over_heads(left, kv_heads).T @ sum_over_heads(right, kv_heads)
        of_tokens = (each[0].float().transpose(0, 1) for each in (left, right))
        return head_moment(*of_tokens, kv_heads)

    @property
    def key_mean(self) -> torch.Tensor:
        """``[width]``."""
        self._check()
        return self._origin + self._key_sum / self.keys

    @property
    def key_moment(self) -> torch.Tensor:
        """Second moment of the centred keys, ``[width, width]``."""
        self._check()
        upper = self._squares.triu(1)
        square = upper + upper.T + self._key_diagonal.diag()
        off = self._key_sum / self.keys
        return square / self.keys - torch.outer(off, off)

    @property
    def predicted_moment(self) -> torch.Tensor:
        """Second moment of the predicted queries, ``[width, width]``."""
        self._check()
        lower = self._squares.tril(-1)
        return (lower + lower.T + self._predicted_diagonal.diag()) / self._weight

    @property
    def cross_moment(self) -> torch.Tensor:
        """Mean outer product of predicted (rows) and true queries, ``[width, width]``."""
        self._check()
        return self._cross / self._weight

    def pair(self, kind: str, rank: int) -> Pair:
        """The projection of this kind; its first columns are those of every smaller rank.

        Parameters
        ----------
        kind
            ``query_aware`` (corrected for what prediction gets wrong) or ``svd_keys``.
        rank
            Columns, at most ``width``.
        """
        raw = self.key_moment + torch.outer(self.key_mean, self.key_mean)
        if kind == "svd_keys":
            return pair_from_moments(kind, raw, None, rank)
        return corrected_pair(
            # A head's constant weighs all its groups against its sinks and tail.
            self.key_moment if self.score == "sum" else raw,
            self.predicted_moment,
            self.cross_moment,
            rank,
            self.queries,
        )

    def energy(self, pair: Pair) -> list[float]:
        """Of the scores' variance that all columns keep, the share of the first 1, 2, .. of them.

        For the query-aware pair, whose columns do not overlap.
        """
        key, query = pair
        keys = (key * (self.key_moment @ key)).sum(0)
        queries = (query * (self.predicted_moment @ query)).sum(0)
        kept = (keys * queries).double().cumsum(0)
        return (kept / kept[-1].clamp_min(1e-30)).tolist()

    def _check(self) -> None:
        if self.keys == 0 or self.queries == 0:
            raise ValueError("moments: must have seen keys and queries; run a sample first")
