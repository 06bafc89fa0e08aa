"""Bytes of clusters: their pages, and what stays in memory, counted as the rules would have it.

The emulation's pages are larger than groups, so what they need is counted here: what they share
with the engine (sinks and tail, staging, scratch) by its own count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from bench.quality.budget import Bytes
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.methods.clusters import CLUSTERS_SHARE, ClusterOptions
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.settings import ALIGNMENT_BYTES

PAGE_BYTES = 4096  # of each KV head of a page
COLUMN_BYTES = 4  # of each token of a page: where it stands in the sequence
CLUSTER_BYTES = 20  # beside the centroid: size, variance, newest token, flags, place on disk
SLOT_BYTES = 4  # of each page that a cluster may have: its record
RECORD_TABLE_BYTES = 32  # of each record: checksum, place, references, as the engine keeps them


@dataclass(frozen=True)
class ClusterPages:
    """The pages of clusters on one model.

    Parameters
    ----------
    rows
        Of one layer: 1, or one for each KV head.
    page_tokens
        The most that fit in `PAGE_BYTES` for each KV head of a page.
    record_bytes
        Of a page on disk.
    """

    rows: int
    row_heads: int
    page_tokens: int
    record_bytes: int


def cluster_pages(shape: ModelShape, heads: str) -> ClusterPages:
    """Of clusters that ``all`` KV heads share, or that ``each`` has for itself."""
    row_heads = 1 if heads == "each" else shape.kv_heads
    token = row_heads * 2 * shape.head_dim * shape.element_bytes
    page = row_heads * PAGE_BYTES
    tokens = page // (token + COLUMN_BYTES)
    if 2 * tokens * token < page:
        raise ValueError(
            f"clusters: a page of {page} bytes must be filled by half, holds {tokens} tokens of "
            f"{token} bytes"
        )
    record = -(-page // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return ClusterPages(shape.kv_heads // row_heads, row_heads, tokens, record)


def cluster_need(
    size: Bytes, config: SwapConfig, options: ClusterOptions, pages: ClusterPages, pages_max: int
) -> Mapping[str, int]:
    """Bytes by use and their "total", for the most clusters that there may ever be.

    Parameters
    ----------
    config
        Whose sinks, tail and buffers for writing these clusters have.
    pages_max
        Of each row, in memory.
    """
    shape, need = size.shape, size.need(dataclasses.replace(config, heads="all"))
    rows = shape.layers * pages.rows
    clusters = -int(-CLUSTERS_SHARE * size.context // options.cluster_tokens)
    slots = -(-options.cluster_tokens_max // pages.page_tokens)
    records = clusters + -(-size.context // pages.page_tokens)
    width = pages.row_heads * shape.head_dim
    parts = {
        "centroids": rows * clusters * width * shape.element_bytes,
        "sizes": rows * clusters * CLUSTER_BYTES,
        "tables": rows * (clusters * slots * SLOT_BYTES + records * RECORD_TABLE_BYTES),
        "pages": rows * pages_max * pages.record_bytes,
        "pending": rows * options.pending_tokens * width * 2 * shape.element_bytes,
        "sinks and tail": need["pages"] - shape.layers * config.pages_max * need["record_bytes"],
        "buffers": need["staging"] + need["scratch"],
    }
    return parts | {"total": sum(parts.values())}


def pages_that_fit(
    size: Bytes, config: SwapConfig, options: ClusterOptions, pages: ClusterPages, budget: int
) -> int:
    """Pages of each row that a budget has room for.

    Raises
    ------
    BudgetError
        When they are fewer than 8.
    """
    from kvswap_torch import _C

    without = cluster_need(size, config, options, pages, 0)["total"]
    page = size.shape.layers * pages.rows * pages.record_bytes
    fitting = (budget - without) // page
    if fitting < _C.GROUPS_MIN:
        raise BudgetError(
            f"kv_memory_bytes: must be at least {without + _C.GROUPS_MIN * page} for clusters of "
            f"{options.cluster_tokens} tokens and {_C.GROUPS_MIN} pages, got {budget}"
        )
    return fitting
