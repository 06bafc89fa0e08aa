"""The ops over page tables and keys: attention, and what each token gets of it.

Conventions are those of `kvswap_torch.ops`, which has them too.
"""

from __future__ import annotations

from torch import Tensor

from kvswap_torch.op_library import compiled as _ops


def paged_attention(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    masks: Tensor,
    positions: Tensor,
    query_positions: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention over the tokens of page tables: KVSwap section 3.4.

    Token ``t`` of a page is seen by query ``i`` if bit ``t`` of the page's mask is set and
    ``position + t <= query_position + i``: causal within the chunk. A query that sees nothing gets
    zeros and a log-sum-exp of -inf.

    Parameters
    ----------
    query
        ``[batch, heads, queries, head_dim]``, fp32, bf16 or fp16; 1..16 queries; ``heads`` is a
        multiple of the KV heads.
    pages
        ``[slots, kv_heads, 2, group_tokens, head_dim]`` of the same dtype; 1..64 tokens. With one
        head in a page and a table for each KV head, pages hold single heads.
    table
        ``[batch, 1 or kv_heads, pages]`` int32 slots; -1 for none.
    masks
        As ``table``, int64: the valid tokens of each page, one bit each.
    positions
        As ``table``, int32: the position of each page's first token.
    query_positions
        ``[batch]`` int32: the position of query 0.
    scale
        Factor of the scores.
    softcap
        Scores become ``softcap * tanh(score / softcap)`` (Gemma 2, section 2); 0: they stay.
    sinks
        ``[heads]`` fp32: a score beside the tokens' that takes weight and adds nothing (gpt-oss).
        Of attentions that are merged, one may have them.

    Returns
    -------
    output
        ``[batch, queries, heads, head_dim]``.
    log_sum_exp
        ``[batch, heads, queries]`` fp32, sinks included.
    """
    return _ops.paged_attention(
        query, pages, table, masks, positions, query_positions, scale, softcap, sinks
    )


def attention_mass(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    masks: Tensor,
    positions: Tensor,
    query_positions: Tensor,
    log_sum_exp: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The attention that each token slot of a page table got; reads keys alone.

    A weight is ``exp(score - log_sum_exp)``; the mean is over the query heads of a KV head
    and the queries, and 0 in slots that no query sees. With the log-sum-exp that `paged_attention`
    gives for the same arguments the means of a KV head sum to 1 (H2O, ARKV).

    Parameters
    ----------
    query, pages, table, masks, positions, query_positions, scale, softcap
        As for `paged_attention`.
    log_sum_exp
        ``[batch, heads, queries]`` fp32.

    Returns
    -------
    mean
        ``[batch, kv_heads, pages * group_tokens]`` fp32.
    square
        The same of the weights' squares.
    """
    return _ops.attention_mass(
        query, pages, table, masks, positions, query_positions, log_sum_exp, scale, softcap
    )


def observe_keys(
    query: Tensor,
    keys: Tensor,
    scale: float,
    valid: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The attention that a chunk's newest queries pay its keys: SnapKV's window.

    What ``keeper="observed"`` goes by, for a `TokenScores` of your own, which is given a chunk's
    queries and keys; the cache itself weighs pages, with `attention_mass`.

    Query ``i`` stands at token ``tokens - queries + i`` and sees no later one. Weights and means
    are those of `attention_mass`.

    Parameters
    ----------
    query
        ``[batch, heads, queries, head_dim]`` of any strides, fp32, bf16 or fp16; at most as many
        as there are tokens.
    keys
        ``[batch, kv_heads, tokens, head_dim]`` of any strides and the same dtype.
    scale, softcap
        As for `paged_attention`.
    valid
        ``[batch, tokens]`` bool, False where a token is padding; None: all count.
    log_sum_exp
        ``[batch, heads, queries]`` fp32, of all that a query attends, earlier chunks too; None: of
        these keys.

    Returns
    -------
    mean, square
        ``[batch, kv_heads, tokens]`` fp32.
    """
    return _ops.observe_keys(query, keys, scale, valid, log_sum_exp, softcap)


def merge_attention(
    output: Tensor, log_sum_exp: Tensor, other_output: Tensor, other_log_sum_exp: Tensor
) -> tuple[Tensor, Tensor]:
    """Joins two attentions over different keys by their log-sum-exp.

    A side whose log-sum-exp is -inf counts for nothing; two such sides give zeros and -inf.

    Parameters
    ----------
    output, other_output
        ``[..., head_dim]``, fp32, bf16 or fp16.
    log_sum_exp, other_log_sum_exp
        ``[...]`` fp32.

    Returns
    -------
    output, log_sum_exp
        New tensors of the same shapes.
    """
    return _ops.merge_attention(output, log_sum_exp, other_output, other_log_sum_exp)
