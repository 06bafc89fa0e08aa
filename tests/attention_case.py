"""Arguments that paged attention is tested with, on every back end."""

from __future__ import annotations

import torch


def make_case(
    dtype=torch.float32,
    batch=2,
    kv_heads=2,
    ratio=2,
    queries=1,
    head_dim=64,
    group_tokens=4,
    pages=12,
    page_heads=None,
    table_heads=1,
):
    """Arguments of paged_attention: random pages in random slots, holes, ragged masks."""
    slots = 2 * pages + 1
    pool = torch.randn(slots, page_heads or kv_heads, 2, group_tokens, head_dim).to(dtype)
    shape = (batch, table_heads, pages)
    table = torch.randint(-1, slots, shape, dtype=torch.int32)
    masks = torch.randint(0, 2**62, shape)
    positions = (torch.arange(pages, dtype=torch.int32) * group_tokens).expand(shape)
    query_positions = torch.full((batch,), pages * group_tokens - queries, dtype=torch.int32)
    query = torch.randn(batch, queries, kv_heads * ratio, head_dim).to(dtype).transpose(1, 2)
    return query, pool, table, masks, positions, query_positions, head_dim**-0.5
