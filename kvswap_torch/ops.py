"""The compiled ops, typed and documented: ``torch.ops.kvswap_torch.*``.

In fp32 inside. On the CPU they run on torch's own threads, and the result does not depend on how
many. Where CUDA was built all run on CUDA tensors too, but `linear_rows`, those that encode and
decode records, and what reads files.
Wrong shapes or dtypes raise ``ValueError`` with what must hold and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvswap_torch.attention_ops import (
    attention_mass,
    merge_attention,
    observe_keys,
    paged_attention,
)
from kvswap_torch.op_library import compiled as _ops
from kvswap_torch.page_ops import (
    decode_int4_records,
    decode_records,
    encode_int4_records,
    encode_records,
    transfer_records,
)
from kvswap_torch.prefetch_ops import (
    prefetch_close,
    prefetch_open,
    prefetch_submit,
    prefetch_wait,
)

__all__ = [
    "attention_mass",
    "decode_int4_records",
    "decode_records",
    "encode_int4_records",
    "encode_records",
    "fp8_dequantize",
    "fp8_quantize",
    "group_mass",
    "group_max",
    "linear_rows",
    "low_rank_score",
    "merge_attention",
    "observe_keys",
    "pack_records",
    "paged_attention",
    "paged_gather",
    "prefetch_close",
    "prefetch_open",
    "prefetch_submit",
    "prefetch_wait",
    "project_keys",
    "select_groups",
    "top_k_groups",
    "transfer_records",
    "unpack_records",
]


def low_rank_score(summary: Tensor, query: Tensor, token_scale: Tensor | None = None) -> Tensor:
    """Scores every token of a summary: KVSwap section 3.3, eq. 1, summed over heads.

    Parameters
    ----------
    summary
        ``[batch, blocks, rank, 16]``, fp32, bf16, fp16 or int8: 16 tokens stand side by side.
    query
        ``[batch, queries, rank]`` fp32: projected queries.
    token_scale
        ``[batch, blocks, 16]`` fp32: the scale of each int8 row, and only then.

    Returns
    -------
    Tensor
        ``[batch, queries, blocks * 16]`` fp32.
    """
    return _ops.low_rank_score(summary, query, token_scale)


def group_max(scores: Tensor, group_tokens: int) -> Tensor:
    """The largest score of each group of consecutive tokens: KVSwap section 3.3, ReduceMax.

    Parameters
    ----------
    scores
        ``[batch, tokens]`` fp32. NaN counts as inf.
    group_tokens
        1..64; the last group may be shorter.

    Returns
    -------
    Tensor
        ``[batch, ceil(tokens / group_tokens)]`` fp32.
    """
    return _ops.group_max(scores, group_tokens)


def group_mass(
    summary: Tensor,
    query: Tensor,
    group_tokens: int,
    join: str = "sum",
    token_scale: Tensor | None = None,
) -> Tensor:
    """The attention that heads pay to each group, by low-rank products: ``score="mass"``.

    Each head's softmax over all tokens, summed in the group, joined over heads.

    Parameters
    ----------
    summary
        ``[batch, blocks, rank, 16]``, fp32, bf16, fp16 or int8.
    query
        ``[batch, heads, rank]`` fp32: each head's projected query, times attention's scale. int8
        rows meet it as int8 numbers with one scale.
    group_tokens
        1..64; the last group may be shorter.
    join
        ``sum`` over heads, or ``max``: what the head pays that pays most.
    token_scale
        ``[batch, blocks, 16]`` fp32 with an int8 summary.

    Returns
    -------
    Tensor
        ``[batch, ceil(blocks * 16 / group_tokens)]`` fp32, positive; -inf where no head has a
        number, inf where a row has none.
    """
    return _ops.group_mass(summary, query, group_tokens, join, token_scale)


def top_k_groups(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best groups of each sequence: KVSwap section 3.3, TopK.

    Ties go to the lower index, so that the choice is the same on every back end.

    Parameters
    ----------
    scores
        ``[batch, groups]`` fp32. -inf and NaN are never chosen.
    k
        How many at most.

    Returns
    -------
    indices
        ``[batch, k]`` int32 in rising order, then -1.
    counts
        ``[batch]`` int32: how many were chosen.
    """
    return _ops.top_k_groups(scores, k)


def select_groups(
    summary: Tensor,
    query: Tensor,
    group_tokens: int,
    k: int,
    token_scale: Tensor | None = None,
    first_tokens: Tensor | None = None,
    last_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score, ReduceMax and TopK in one pass over the summary: KVSwap section 3.3.

    Parameters
    ----------
    summary
        ``[batch, blocks, rank, 16]``, fp32, bf16, fp16 or int8.
    query
        ``[batch, rank]`` fp32.
    group_tokens
        1..64.
    k
        Groups to choose at most.
    token_scale
        ``[batch, blocks, 16]`` fp32 with an int8 summary.
    first_tokens, last_tokens
        ``[batch]`` int64: only tokens in ``[first, last)`` count. Default: all.

    Returns
    -------
    indices
        ``[batch, k]`` int32 in rising order, then -1.
    counts
        ``[batch]`` int32.
    """
    return _ops.select_groups(
        summary, query, group_tokens, k, token_scale, first_tokens, last_tokens
    )


def project_keys(
    keys: Tensor, projection: Tensor, summary_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Compresses keys to a summary: KVSwap section 3.2, ``K_lr = flatten(K) A``.

    Parameters
    ----------
    keys
        ``[batch, kv_heads, tokens, head_dim]`` of any strides, fp32, bf16 or fp16.
    projection
        ``[kv_heads * head_dim, rank]`` fp32.
    summary_dtype
        fp32, bf16, fp16 or int8; default: that of the keys.

    Returns
    -------
    summary
        ``[batch, ceil(tokens / 16), rank, 16]``; tokens that are not there are zero.
    token_scale
        int8: ``[batch, ceil(tokens / 16), 16]`` fp32, the row's largest magnitude / 127. Otherwise
        empty, ``[0]``.
    """
    return _ops.project_keys(keys, projection, summary_dtype)


def linear_rows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` of few rows, as fast as memory gives the weights.

    Sums are fp32; the bias is added, and the result rounded once. What a row becomes does not
    depend on the rows beside it. No gradients.

    Parameters
    ----------
    input
        ``[..., inputs]``, some 16 rows of them at most: fp32, bf16 or fp16, as are the others.
    weight
        ``[outputs, inputs]``, contiguous.
    bias
        ``[outputs]``.

    Returns
    -------
    Tensor
        ``[..., outputs]``.
    """
    return _ops.linear_rows(input, weight, bias)


def paged_gather(pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Copies the tokens of page tables to contiguous K and V, in the order of the tables.

    Parameters
    ----------
    pages
        ``[slots, kv_heads, 2, group_tokens, head_dim]``, fp32, bf16 or fp16: each head's K, then
        its V. With one head in a page and a table for each, pages hold single heads.
    table
        ``[batch, 1 or kv_heads, pages]`` int32 slots; -1 gives zeros.

    Returns
    -------
    keys, values
        ``[batch, kv_heads, pages * group_tokens, head_dim]``.
    """
    return _ops.paged_gather(pages, table)


def pack_records(keys: Tensor, values: Tensor, group_tokens: int) -> Tensor:
    """Cuts K and V into records, the byte order of disk and pages: KVSwap section 3.4.

    Parameters
    ----------
    keys, values
        ``[batch, kv_heads, tokens, head_dim]`` of any strides (HND, or NHD seen through
        ``transpose(1, 2)``), fp32, bf16 or fp16.
    group_tokens
        Tokens of a record, 1..64.

    Returns
    -------
    Tensor
        ``[batch, ceil(tokens / group_tokens), kv_heads, 2, group_tokens, head_dim]``; missing
        tokens of the last record are zero.
    """
    return _ops.pack_records(keys, values, group_tokens)


def unpack_records(records: Tensor, tokens: int, layout: str = "hnd") -> tuple[Tensor, Tensor]:
    """The way back from :func:`pack_records`.

    Parameters
    ----------
    records
        ``[batch, groups, kv_heads, 2, group_tokens, head_dim]``, fp32, bf16 or fp16.
    tokens
        How many tokens to take, at most ``groups * group_tokens``.
    layout
        Byte order of the result: ``"hnd"`` or ``"nhd"``.

    Returns
    -------
    keys, values
        ``[batch, kv_heads, tokens, head_dim]``; with ``"nhd"`` a transposed view.
    """
    return _ops.unpack_records(records, tokens, layout)


def fp8_quantize(source: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds to e4m3 with a scale per row (token and head): ARKV's low-precision tier.

    Parameters
    ----------
    source
        ``[..., head_dim]``, fp32, bf16 or fp16.

    Returns
    -------
    quantized
        ``[..., head_dim]`` ``float8_e4m3fn``, rounded to nearest even.
    scales
        ``[...]`` fp32: largest magnitude of the row / 448; 1 for a row of zeros.
    """
    return _ops.fp8_quantize(source)


def fp8_dequantize(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The way back from :func:`fp8_quantize`.

    Parameters
    ----------
    quantized
        ``[..., head_dim]`` ``float8_e4m3fn``.
    scales
        ``[...]`` fp32.
    dtype
        fp32, bf16 or fp16.

    Returns
    -------
    Tensor
        ``[..., head_dim]`` of ``dtype``.
    """
    return _ops.fp8_dequantize(quantized, scales, dtype)
