"""Projections of one block for each KV head: a head's columns meet its own keys and queries alone.

`pca_per_head`
    Loki's: the principal components of each head's keys, A_q = A_k.
`skewed`
    InfiniGen's: each head's keys and queries are rotated by the right singular vectors of its
    queries, which changes no product; of the rotated columns those are kept that weigh most, in
    queries and keys.
`channels`
    ThinK's: single channels of each head's keys, those that the newest queries meet most.

Column j belongs to KV head ``j % kv_heads``, so that the first r columns are a projection of rank r
that treats all heads alike. With one KV head (``heads="each"``) a block is the whole.
"""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def pca_per_head(keys: torch.Tensor, kv_heads: int, rank: int) -> Pair:
    """The directions in which a head's keys vary most (Loki, section 3).

    Parameters
    ----------
    keys
        ``[samples, kv_heads * head_dim]`` after RoPE.
    kv_heads
        Blocks.
    rank
        Columns of all blocks together.

    Returns
    -------
    tuple
        Twice the same ``[kv_heads * head_dim, rank]`` fp32 matrix with orthonormal columns.
    """
    centred = keys.float() - keys.float().mean(0)
    directions = [
        torch.linalg.eigh(own.T @ own).eigenvectors.flip(1)
        for own in centred.chunk(kv_heads, dim=1)
    ]
    matrix = interleaved(directions, rank)
    return matrix, matrix


def skewed(queries: torch.Tensor, kv_heads: int, rank: int) -> Pair:
    """The columns that weigh most after InfiniGen's skew (sections 4.2, 4.3).

    That is by their summed size in the rotated queries, as the published code that fetches tokens
    has it (`bench/oracles`); what it measures accuracy with adds those that are largest in the
    rotated keys, so that columns are more than the ratio says. With fewer KV heads than heads, the
    queries of all that share one are rotated together.

    Parameters
    ----------
    queries
        ``[samples, heads, head_dim]`` after RoPE.
    kv_heads, rank
        As for `pca_per_head`.
    """
    chosen = []
    for asked in queries.float().chunk(kv_heads, 1):
        skew = skew_of(asked.flatten(0, 1))
        sizes = (asked @ skew).abs().sum((0, 1))
        chosen.append(skew[:, sizes.argsort(descending=True)])
    matrix = interleaved(chosen, rank)
    return matrix, matrix


def channels(keys: torch.Tensor, queries: torch.Tensor | None, kv_heads: int, rank: int) -> Pair:
    """The channels with the largest product of norms, of queries and of keys (ThinK, section 3.2).

    With fewer KV heads than heads, the queries of all that share one count together. Ties to the
    lower channel.

    Parameters
    ----------
    keys
        ``[samples, kv_heads * head_dim]`` after RoPE.
    queries
        ``[samples, heads, head_dim]``, the newest; None: the keys' norms alone decide.
    kv_heads, rank
        As for `pca_per_head`.

    Returns
    -------
    tuple
        Twice the same ``[kv_heads * head_dim, rank]`` fp32 matrix; a column has a single one.
    """
    weights = keys.float().norm(dim=0).unflatten(0, (kv_heads, -1))
    if queries is not None:
        of_heads = queries.float().unflatten(1, (kv_heads, -1))  # [samples, kv_heads, ratio, dim]
        weights = weights * of_heads.norm(dim=(0, 2))
    axes = torch.eye(weights.shape[1], device=keys.device)
    orders = weights.argsort(dim=1, descending=True, stable=True)
    matrix = interleaved([axes[:, order] for order in orders], rank)
    return matrix, matrix


def skew_of(queries: torch.Tensor) -> torch.Tensor:
    """The orthogonal ``[head_dim, head_dim]`` matrix that gathers the queries' weight in few
    columns: the right singular vectors of ``[samples, head_dim]`` queries, also of few samples."""
    return torch.linalg.eigh(queries.T @ queries).eigenvectors.flip(1)


def interleaved(of_heads: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Blocks ``[head_dim, columns]`` of each KV head as one matrix, its columns in turn."""
    whole = torch.block_diag(*of_heads)
    columns = of_heads[0].shape[1]
    in_turn = torch.arange(whole.shape[1]).unflatten(0, (len(of_heads), columns)).T.flatten()
    return whole[:, in_turn[:rank].to(whole.device)].contiguous()
