"""Projections: the pair of matrices that turns keys and queries into low-rank ones.

A key k becomes k A_k and a query q becomes q A_q, both of length `rank`, so that their product is
close to q . k. Ways to choose them:

`svd_keys`
    The paper's (KVSwap, section 3.2): the right singular vectors of the keys, A_q = A_k.
`query_aware`
    The best rank-r form of q . k itself: with Cq and Ck the second moments of queries and centred
    keys, from the SVD of Cq^1/2 Ck^1/2. Better at the same rank, since only q . k is needed.

`pca_per_head`, `skewed`, `channels`, `rope_pairs`
    One block for each KV head, no head's columns meeting another's keys or queries: Loki's
    principal components of each head's keys; InfiniGen's columns of keys and queries rotated by
    their queries' SVD; ThinK's single channels of each head's keys; pairs of channels that RoPE
    turns together, those that add most to products with the newest queries, by a rule of our own.

Keys are one token's K of all KV heads side by side, after RoPE. Where groups are scored by a sum
over heads, queries are summed over the heads of each KV head; where each head is scored for itself,
each head's query is a query, with zeros at the other KV heads' keys. Columns come in falling order
of weight: the first r of a projection are the projection of rank r.

They are made in C++ (csrc/torch/projection.h), for programs without Python too.
"""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def svd_keys(keys: torch.Tensor, rank: int) -> Pair:
    """The paper's projection.

    Parameters
    ----------
    keys
        ``[samples, width]``, any float dtype; fewer samples than `rank` are fine.
    rank
        Columns, at most ``width``.

    Returns
    -------
    tuple
        Twice the same ``[width, rank]`` fp32 matrix with orthonormal columns.
    """
    _check("svd_keys", keys, rank)
    keys = keys.float()
    return pair_from_moments("svd_keys", keys.T @ keys / len(keys), None, rank)


def query_aware(keys: torch.Tensor, queries: torch.Tensor, rank: int) -> Pair:
    """The projection with the least expected error of q . k.

    With L L^T = moment + ridge for queries (Lq) and centred keys (Lk), where the ridge stands for
    directions that too few samples did not show, and Lq^T Lk = U S V^T, the
    columns are A_k = Lq U S^-1/2 and A_q = Lk V S^-1/2: no inverse of a moment is taken, so fewer
    samples than dimensions do no harm.

    Parameters
    ----------
    keys
        ``[samples, width]``.
    queries
        ``[samples, width]``, each summed over the heads of a KV head; the count may differ.
    rank
        Columns, at most ``width``.

    Returns
    -------
    tuple
        The key and the query matrix, ``[width, rank]`` fp32.
    """
    _check("query_aware", keys, rank)
    _check("query_aware", queries, rank)
    keys, queries = keys.float(), queries.float()
    centred = keys - keys.mean(0)
    key_moment = centred.T @ centred / len(keys)
    query_moment = queries.T @ queries / len(queries)
    counts = (len(keys), len(queries))
    return pair_from_moments("query_aware", key_moment, query_moment, rank, counts)


def pair_from_moments(
    kind: str,
    key_moment: torch.Tensor,
    query_moment: torch.Tensor | None,
    rank: int,
    counts: tuple[int, int] = (1, 1),
) -> Pair:
    """A projection from second moments, which can be gathered over any amount of text.

    Parameters
    ----------
    kind
        ``svd_keys`` (of the keys as they are) or ``query_aware`` (of centred keys, and queries).
    key_moment, query_moment
        ``[width, width]`` mean outer products; `query_moment` only for ``query_aware``.
    rank
        Columns, at most ``width``.
    counts
        Samples that the moments of keys and queries were made of.
    """
    from kvswap_torch import _C

    return _C.pair_from_moments(kind, key_moment, query_moment, rank, counts)


def from_chunk(
    kind: str,
    keys: torch.Tensor,
    query: torch.Tensor | None,
    rank: int,
    valid: torch.Tensor | None = None,
    score: str = "sum",
    heads: str = "all",
    rotary: int | None = None,
) -> Pair:
    """A projection from one chunk's own keys and queries, when nobody calibrated one.

    A bounded sample is looked at: keys evenly over the chunk; of the queries half evenly and half
    the newest, which resemble most those to come. With too few queries the keys alone decide.
    Every layer gets as many columns: ranks guessed from the prompt's own last queries find no more
    (measured: within 0.002 of attention mass from 24 columns on).

    Parameters
    ----------
    kind
        As `SwapConfig.projection_kind`.
    keys
        ``[batch, kv_heads, tokens, head_dim]`` after RoPE.
    query
        ``[batch, heads, tokens, head_dim]`` of the same tokens, or None.
    rank
        Columns, at most ``kv_heads * head_dim``; even for ``rope_pairs``.
    valid
        ``[batch, tokens]`` bool; None: all.
    score
        As in `SwapConfig`: ``sum``, or another one, for which each head counts for itself.
    heads
        As in `SwapConfig`: with ``each`` every KV head has a projection of its own keys, at most
        ``head_dim`` wide, and the pair holds them one below the other.
    rotary
        Of ``rope_pairs``: how many of a head's first channels are turned by position, i together
        with i + rotary / 2; None: all.

    Raises
    ------
    ValueError
        For a rank out of range, or of ``rope_pairs`` an odd one.
    """
    from kvswap_torch import _C

    return _C.estimate_projection(kind, keys, query, rank, valid, score, heads, rotary or 0)


def of_keys_alone(kind: str) -> str:
    """What a kind of projection is where there are no queries, or too few, to make it from."""
    from kvswap_torch import _C

    return _C.kind_of_keys_alone(kind)


def head_moment(left: torch.Tensor, right: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Outer products of two queries, ``[tokens, heads, head_dim]`` each, summed over tokens.

    Each head's stands at its KV head's keys: ``[kv_heads * head_dim, kv_heads * head_dim]``, zero
    but for a block a KV head.
    """
    from kvswap_torch import _C

    return _C.head_moment(left, right, kv_heads)


def leading_svd(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `rank` largest singular triplets of ``[rows, columns]``, by subspace iteration when few.

    Returns
    -------
    tuple
        ``[rows, rank]``, ``[rank]`` falling, ``[columns, rank]``.
    """
    from kvswap_torch import _C

    return _C.leading_svd(matrix, rank)


def sum_over_heads(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[batch, heads, tokens, head_dim]`` to ``[batch * tokens, kv_heads * head_dim]`` fp32."""
    summed = query.float().unflatten(1, (kv_heads, -1)).sum(2)
    return flat_tokens(summed)


def flat_tokens(keys: torch.Tensor) -> torch.Tensor:
    """``[batch, kv_heads, tokens, head_dim]`` to ``[batch * tokens, kv_heads * head_dim]``."""
    return keys.transpose(1, 2).flatten(2).flatten(0, 1)


def _check(where: str, samples: torch.Tensor, rank: int) -> None:
    if samples.dim() != 2 or len(samples) == 0:
        shape = tuple(samples.shape)
        raise ValueError(f"{where}: samples must be [count >= 1, width], got {shape}")
    if not 1 <= rank <= samples.shape[1]:
        raise ValueError(f"{where}: rank must be 1 to {samples.shape[1]}, got {rank}")
