"""Second moments of one layer's keys and queries, gathered in bounded memory."""

from __future__ import annotations

import torch

from kvswap_torch.projection import Pair, flat_tokens, pair_from_moments, sum_over_heads
from tuning.observe import Observed

PIECE_TOKENS = 512  # a piece in fp32 stays small beside the moments
READ_SHARE = 0.1  # weight of the queries of tokens that are only read


class LayerMoments:
    """Streaming moments of one layer (KVSwap, appendix A.1).

    Two fp32 matrices ``[width, width]`` and two vectors, whatever the text's length: 8 MiB for 8 KV
    heads of 128. Keys are moved by their first chunk's mean, so that centring them at the end
    loses no digits. Queries are summed over the heads of each KV head, because groups are scored
    by a sum over heads.

    Keys are those of all tokens, but queries mostly those of tokens in focus: only they choose.
    Queries of tokens that are merely read keep a small share, so that no direction is lost that
    another text may need.
    """

    def __init__(self, width: int):
        self.width = width
        self.keys = 0
        self.queries = 0
        self._weight = 0.0
        self._origin: torch.Tensor | None = None
        self._key_sum = torch.zeros(width)
        self._key_square = torch.zeros(width, width)
        self._query_square = torch.zeros(width, width)

    def add(self, seen: Observed, focus: int) -> None:
        """Counts one layer's sample; tokens from `focus` on choose with what they look for."""
        kv_heads = seen.keys.shape[1]
        self._add_keys(seen.keys)
        self._add_queries(seen.query[:, :, :focus], kv_heads, READ_SHARE)
        self._add_queries(seen.query[:, :, focus:], kv_heads, 1.0 - READ_SHARE)
        self.queries += seen.query.shape[2] - focus

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return 2 * self._key_square.nbytes + 2 * self._key_sum.nbytes

    def _add_keys(self, keys: torch.Tensor) -> None:
        """keys: ``[batch, kv_heads, tokens, head_dim]`` after RoPE."""
        for piece in keys.split(PIECE_TOKENS, dim=2):
            rows = flat_tokens(piece).float()
            if self._origin is None:
                self._origin = rows.mean(0)
            rows = rows - self._origin
            self._key_sum += rows.sum(0)
            self._key_square.addmm_(rows.T, rows)
            self.keys += len(rows)

    def _add_queries(self, query: torch.Tensor, kv_heads: int, weight: float) -> None:
        """query: ``[batch, heads, tokens, head_dim]`` after RoPE; weight: of all of them."""
        count = query.shape[0] * query.shape[2]
        for piece in query.split(PIECE_TOKENS, dim=2):
            rows = sum_over_heads(piece, kv_heads)
            self._query_square.addmm_(rows.T, rows, alpha=weight / count)
        self._weight += weight

    @property
    def key_mean(self) -> torch.Tensor:
        """``[width]``."""
        self._check()
        return self._origin + self._key_sum / self.keys

    @property
    def key_moment(self) -> torch.Tensor:
        """Second moment of the centred keys, ``[width, width]``."""
        self._check()
        off = self._key_sum / self.keys
        return self._key_square / self.keys - torch.outer(off, off)

    @property
    def query_moment(self) -> torch.Tensor:
        """Second moment of the summed queries, ``[width, width]``."""
        self._check()
        return self._query_square / self._weight

    def pair(self, kind: str, rank: int) -> Pair:
        """The projection of this kind; its first columns are those of every smaller rank.

        Parameters
        ----------
        kind
            ``query_aware`` or ``svd_keys``.
        rank
            Columns, at most ``width``.
        """
        if kind == "svd_keys":
            raw = self.key_moment + torch.outer(self.key_mean, self.key_mean)
            return pair_from_moments(kind, raw, None, rank)
        counts = (self.keys, self.queries)
        return pair_from_moments(kind, self.key_moment, self.query_moment, rank, counts)

    def energy(self, pair: Pair) -> list[float]:
        """Share of the scores' variance that the first r columns keep, r = 1 .. columns."""
        key, query = (matrix.double() for matrix in pair)
        keys, queries = self.key_moment.double(), self.query_moment.double()
        total = (keys * queries).sum().clamp_min(1e-30)
        # E (q.k - q Q K^T k)^2 = tr(Ck Cq) - 2 tr(Ck K Q^T Cq) + tr(Q^T Cq Q . K^T Ck K).
        cross = (key * (keys @ queries @ query)).sum(0).cumsum(0)
        inner = (query.T @ queries @ query) * (key.T @ keys @ key)
        both = torch.stack([inner[:r, :r].sum() for r in range(1, len(inner) + 1)])
        return ((2 * cross - both) / total).tolist()

    def _check(self) -> None:
        if self.keys == 0 or self.queries == 0:
            raise ValueError("moments: must have seen keys and queries; run a sample first")
