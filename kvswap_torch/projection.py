"""Projections: the pair of matrices that turns keys and queries into low-rank ones.

A key k becomes k A_k and a query q becomes q A_q, both of length `rank`, so that their product is
close to q . k. Ways to choose them:

`svd_keys`
    The paper's (KVSwap, section 3.2): the right singular vectors of the keys, A_q = A_k.
`query_aware`
    The best rank-r form of q . k itself: with Cq and Ck the second moments of queries and centred
    keys, from the SVD of Cq^1/2 Ck^1/2. Better at the same rank, since only q . k is needed.

`pca_per_head`, `skewed`, `channels`
    One block for each KV head, no head's columns meeting another's keys: see `blocks`.

Keys are one token's K of all KV heads side by side, after RoPE. Where groups are scored by a sum
over heads, queries are summed over the heads of each KV head; where each head is scored for itself,
each head's query is a query, with zeros at the other KV heads' keys. Columns come in falling order
of weight: the first r of a projection are the projection of rank r.
"""

from __future__ import annotations

import torch

from kvswap_torch import blocks

Pair = tuple[torch.Tensor, torch.Tensor]

RIDGE = 1e-2  # share of the mean variance added to a moment of one sample, less for more
KEYS_MAX = 2048  # tokens of a chunk that an estimate looks at
QUERIES_NEWEST = 512
QUERIES_MIN = 8
WINDOW = 32  # newest queries that choose channels (ThinK, section 4.1)
SVD_PASSES = 4  # of subspace iteration; the spectrum of keys falls fast


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
    if kind == "svd_keys":
        # The moment's singular vectors are the keys' right ones.
        directions = leading_svd(key_moment, rank)[0].contiguous()
        return directions, directions
    key_factor = _factor(key_moment, counts[0])
    query_factor = _factor(query_moment, counts[1])
    left, weights, right = leading_svd(query_factor.T @ key_factor, rank)
    scale = weights.clamp_min(weights[0].clamp_min(1e-30) * 1e-7).rsqrt()
    return query_factor @ left * scale, key_factor @ right * scale


def from_chunk(
    kind: str,
    keys: torch.Tensor,
    query: torch.Tensor | None,
    rank: int,
    valid: torch.Tensor | None = None,
    score: str = "sum",
    heads: str = "all",
) -> Pair:
    """A projection from one chunk's own keys and queries, when nobody calibrated one.

    A bounded sample is looked at: keys evenly over the chunk; of the queries half evenly and half
    the newest, which resemble most those to come. With too few queries the keys alone decide.
    Every layer gets as many columns: ranks guessed from the prompt's own last queries find no more
    (`bench/estimated_ranks.py`: within 0.002 of attention mass from 24 columns on).

    Parameters
    ----------
    kind
        As `SwapConfig.projection_kind`.
    keys
        ``[batch, kv_heads, tokens, head_dim]`` after RoPE.
    query
        ``[batch, heads, tokens, head_dim]`` of the same tokens, or None.
    rank
        Columns, at most ``kv_heads * head_dim``.
    valid
        ``[batch, tokens]`` bool; None: all.
    score
        As in `SwapConfig`: ``sum``, or another one, for which each head counts for itself.
    heads
        As in `SwapConfig`: with ``each`` every KV head has a projection of its own keys, at most
        ``head_dim`` wide, and the pair holds them one below the other.
    """
    if heads == "each":
        queries = [None] * keys.shape[1] if query is None else query.chunk(keys.shape[1], 1)
        own = zip(keys.split(1, 1), queries, strict=True)
        pairs = [from_chunk(kind, one, asked, rank, valid, score) for one, asked in own]
        key_sides, query_sides = zip(*pairs, strict=True)
        return torch.cat(key_sides), torch.cat(query_sides)
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    per_sequence = max(1, KEYS_MAX // len(keys))
    evenly = torch.linspace(0, tokens - 1, min(tokens, per_sequence)).long()
    sample = flat_tokens(keys[:, :, evenly])
    if valid is not None and valid[:, evenly].any():
        sample = sample[valid[:, evenly].flatten()]
    kind = kind if query is not None else of_keys_alone(kind)
    if kind == "svd_keys":
        return svd_keys(sample, rank)
    if kind == "pca_per_head":
        return blocks.pca_per_head(sample, kv_heads, rank)
    if kind == "channels":
        return blocks.channels(sample, _newest(query, valid), kv_heads, rank)
    newest = torch.arange(max(0, tokens - max(1, QUERIES_NEWEST // len(keys))), tokens)
    looked_at = torch.cat([evenly[:: max(1, len(evenly) // max(1, len(newest)))], newest])
    queries = query[:, :, looked_at].float().transpose(1, 2).flatten(0, 1)
    if valid is not None:
        queries = queries[valid[:, looked_at].flatten()]
    if len(queries) < QUERIES_MIN:
        return from_chunk(of_keys_alone(kind), keys, None, rank, valid)
    if kind == "skewed":
        return blocks.skewed(queries, kv_heads, rank)
    if score == "sum":
        return query_aware(sample, queries.unflatten(1, (kv_heads, -1)).sum(2).flatten(1), rank)
    _check("from_chunk", sample, rank)
    sample = sample.float()
    # Not centred, though a head's constant cancels among candidates: it was measured to do no good.
    moments = (
        sample.T @ sample / len(sample),
        head_moment(queries, queries, kv_heads) / len(queries),
    )
    return pair_from_moments("query_aware", *moments, rank, (len(sample), len(queries)))


def _newest(query: torch.Tensor | None, valid: torch.Tensor | None) -> torch.Tensor | None:
    """The newest `WINDOW` tokens' queries of every sequence, ``[samples, heads, head_dim]``."""
    if query is None:
        return None
    window = query[:, :, -WINDOW:].transpose(1, 2).flatten(0, 1)
    return window if valid is None else window[valid[:, -WINDOW:].flatten()]


def of_keys_alone(kind: str) -> str:
    """What a kind of projection is where there are no queries, or too few, to make it from."""
    return {"query_aware": "svd_keys", "skewed": "pca_per_head"}.get(kind, kind)


def head_moment(left: torch.Tensor, right: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Outer products of two queries, ``[tokens, heads, head_dim]`` each, summed over tokens.

    Each head's stands at its KV head's keys: ``[kv_heads * head_dim, kv_heads * head_dim]``, zero
    but for a block a KV head.
    """
    blocks = [
        one.flatten(0, 1).T @ other.flatten(0, 1)
        for one, other in zip(
            left.unflatten(1, (kv_heads, -1)).unbind(1),
            right.unflatten(1, (kv_heads, -1)).unbind(1),
            strict=True,
        )
    ]
    return torch.block_diag(*blocks)


def leading_svd(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `rank` largest singular triplets of ``[rows, columns]``, by subspace iteration when few.

    Returns
    -------
    tuple
        ``[rows, rank]``, ``[rank]`` falling, ``[columns, rank]``.
    """
    size = min(matrix.shape)
    width = rank + 16
    if 3 * width >= size:
        left, weights, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, :rank], weights[:rank], right[:rank].T.contiguous()
    # A generator of its own: sampling in generate() must not change with it.
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(matrix.shape[1], width, generator=generator, dtype=matrix.dtype)
    basis = basis.to(matrix.device)
    for _ in range(SVD_PASSES):
        basis = torch.linalg.qr(matrix @ basis).Q
        basis = torch.linalg.qr(matrix.T @ basis).Q
    left, weights, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return left[:, :rank], weights[:rank], (basis @ right.T)[:, :rank].contiguous()


def sum_over_heads(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[batch, heads, tokens, head_dim]`` to ``[batch * tokens, kv_heads * head_dim]`` fp32."""
    summed = query.float().unflatten(1, (kv_heads, -1)).sum(2)
    return flat_tokens(summed)


def flat_tokens(keys: torch.Tensor) -> torch.Tensor:
    """``[batch, kv_heads, tokens, head_dim]`` to ``[batch * tokens, kv_heads * head_dim]``."""
    return keys.transpose(1, 2).flatten(2).flatten(0, 1)


def _factor(moment: torch.Tensor, count: int) -> torch.Tensor:
    """Lower triangular L with L L^T = moment + a ridge that fades with the samples' count."""
    width = len(moment)
    moment = moment.double()
    mean = moment.diagonal().mean().clamp_min(1e-30)
    ridge = RIDGE * mean * width / (width + count - 1)
    return torch.linalg.cholesky(
        moment + ridge * torch.eye(width, dtype=moment.dtype, device=moment.device)
    ).float()


def _check(where: str, samples: torch.Tensor, rank: int) -> None:
    if samples.dim() != 2 or len(samples) == 0:
        shape = tuple(samples.shape)
        raise ValueError(f"{where}: samples must be [count >= 1, width], got {shape}")
    if not 1 <= rank <= samples.shape[1]:
        raise ValueError(f"{where}: rank must be 1 to {samples.shape[1]}, got {rank}")
