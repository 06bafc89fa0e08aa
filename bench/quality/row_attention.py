"""Attention of samples over a document they share and their own tokens, in plain torch."""

from __future__ import annotations

import torch

from bench.quality.view import View

GATHERED_ROWS = 8  # attended at once, so that what is gathered stays in the processor's cache


def attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of a chunk, and over everything before it.

    Parameters
    ----------
    query
        ``[batch, heads, n, head_dim]``.
    keys, values
        ``[batch, kv_heads, n, head_dim]``.
    before
        Keys and values ``[batch, kv_heads, tokens, head_dim]``; None: the chunk is the first.

    Returns
    -------
    Tensor
        As `query`.
    """
    output, log_sum = _flash(query, keys, values, scale, is_causal=True)
    if before is None:
        return output.to(query.dtype)
    return _merge((output, log_sum), _flash(query, *before, scale)).to(query.dtype)


def attend_all(view: View) -> torch.Tensor:
    """The full cache: every row attends to the document and to its sample up to itself.

    Returns
    -------
    Tensor
        ``[batch, heads, n, head_dim]``.
    """
    own = _flash(view.query, view.keys, view.values, view.scale, is_causal=True)
    # All samples' rows are one batch of queries over the document.
    together = view.query.transpose(0, 1).flatten(1, 2)[None]
    keys, values = (t.transpose(0, 1)[None] for t in (view.past.keys, view.past.values))
    output, log_sum = _flash(together, keys, values, view.scale)
    apart = (view.batch, view.rows)
    document = (
        output[0].unflatten(1, apart).transpose(0, 1),
        log_sum[0].unflatten(1, apart).transpose(0, 1),
    )
    return _merge(own, document).to(view.query.dtype)


def attend_chosen(view: View, mask: torch.Tensor) -> torch.Tensor:
    """Attention over chosen columns only.

    Parameters
    ----------
    mask
        ``[batch, 1 or kv_heads, n, columns]`` bool; columns after a row's own do not count.

    Returns
    -------
    Tensor
        ``[batch, heads, n, head_dim]``.
    """
    mask = mask & view.causal()
    # Rows that see everything would make the table as wide as the document.
    whole = (mask == view.causal()).all(-1).all(1)  # [batch, n]
    if whole.any():
        mask = mask & (~whole[:, None, :, None] | view.own())
    outputs = []
    for head in range(view.kv_heads):
        if head < mask.shape[1]:
            table, seen = column_table(mask[:, head])
            # A sample's own columns stand behind the document, one sample after the other.
            shift = torch.arange(view.batch).repeat_interleave(view.rows)[:, None] * view.rows
            table = torch.where(table >= view.past.tokens, table + shift, table)
        outputs.append(_attend_head(view, head, table, seen))
    output = torch.cat(outputs, 1).to(view.query.dtype)
    return torch.where(whole[:, None, :, None], attend_all(view), output) if whole.any() else output


def _attend_head(view: View, head: int, table: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """table, seen: [batch * n, chosen] -> [batch, query heads of this KV head, n, head_dim]."""
    # fp32 and one head at a time: gathered rows then need no copy before they are multiplied.
    keys, values = (
        torch.cat([past[:, head], own[:, head].flatten(0, 1)]).float()
        for past, own in ((view.past.keys, view.keys), (view.past.values, view.values))
    )  # [T + batch * n, head_dim]
    query = view.query.unflatten(1, (view.kv_heads, view.repeats))[:, head]
    query = query.transpose(1, 2).flatten(0, 1).float() * view.scale
    outputs = []
    pieces = (tensor.split(GATHERED_ROWS) for tensor in (query, table, seen))
    for q, columns, visible in zip(*pieces, strict=True):
        size = (*columns.shape, keys.shape[1])
        k, v = (rows.index_select(0, columns.flatten()).view(size) for rows in (keys, values))
        scores = torch.bmm(q, k.transpose(1, 2))  # [rows, repeats, chosen]
        weights = scores.masked_fill_(~visible[:, None], -torch.inf).softmax(-1)
        outputs.append(torch.bmm(weights, v))
    return torch.cat(outputs).unflatten(0, (view.batch, view.rows)).transpose(1, 2)


def column_table(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen columns of each row, side by side.

    Parameters
    ----------
    mask
        ``[..., columns]`` bool; each row must have one at least, its own token.

    Returns
    -------
    tuple
        ``[rows, most]`` int64 in rising order, then 0; and which of them are there.
    """
    flat = mask.reshape(-1, mask.shape[-1])
    row, column = flat.nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(flat))
    starts = counts.cumsum(0) - counts
    table = torch.zeros(len(flat), int(counts.max()), dtype=torch.long)
    place = torch.arange(len(row)) - starts[row]
    table[row, place] = column
    return table, torch.arange(table.shape[1]) < counts[:, None]


Partial = tuple[torch.Tensor, torch.Tensor]


def _flash(query, keys, values, scale: float, is_causal: bool = False) -> Partial:
    """Output [batch, heads, n, head_dim] and its log-sum-exp [batch, heads, n], both fp32."""
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, scale=scale
    )
    return output.float(), log_sum.float()


def _merge(one: Partial, other: Partial) -> torch.Tensor:
    total = torch.logaddexp(one[1], other[1])
    parts = (output * (log_sum - total).exp()[..., None] for output, log_sum in (one, other))
    return sum(parts)
