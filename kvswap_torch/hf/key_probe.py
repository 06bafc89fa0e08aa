"""Whether a saved cache is this model's: keys and values of its first tokens, computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.families import changes_with_length
from kvswap_torch.hf.indexed import IndexedLayer
from kvswap_torch.hf.vision_positions import placeholders
from kvswap_torch.int4_rows import int4_rotated, int4_steps

if TYPE_CHECKING:
    from kvswap_torch.config import SwapConfig
    from kvswap_torch.hf.cache import KVSwapCache

TOKENS = 16
# In memory, and of keys and values by token.
KINDS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer)
# Of the norm of the difference to that of keys, or values. Equal weights differ by rounding: sums
# are made in another order in a short pass. Another projection or rotation differs in the third
# digit.
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def probe(cache: KVSwapCache, ids: torch.Tensor | None, valid: torch.Tensor | None) -> str:
    """Compares; "passed" and how far apart they were, or why nothing could be compared.

    Layers on disk, and of those in memory what they still have of the first tokens: a window that
    has moved on has none of them.

    Parameters
    ----------
    ids
        ``[batch, positions]``; None: not known.
    valid
        ``[batch, positions]`` bool; None: no padding.

    Raises
    ------
    ConfigError
        Keys or values are another model's.
    """
    if ids is None:
        return "skipped: the cache was made from embeddings or another cache, and has no token ids"
    if changes_with_length(cache.parts):
        return "skipped: this model rotates keys by the length of the text"
    if hasattr(getattr(cache.parts.decoder, "embeddings", None), "padding_idx"):  # RoBERTa's
        return "skipped: this model numbers positions otherwise where it is not given them"
    # A few tokens are all attended, whatever an index makes of those that score alike.
    count = min(TOKENS, ids.shape[1], cache.parts.index_topk or TOKENS)
    sequence = _without_padding(valid, count, ids.shape[0])
    if sequence is None:
        return "skipped: every sequence begins with padding"
    count = _before_an_image(cache, ids[sequence, :count])
    if count == 0:
        return "skipped: the text begins with an image, or the like"
    most = 0.0
    for index, what, saved, fresh in _pairs(cache, sequence, ids[sequence : sequence + 1, :count]):
        apart = fresh.float() - saved.float()
        if index in cache.parts.disk_index:
            apart = _unexplained(apart, saved.float(), cache.driver.config)
        difference = float(apart.norm() / saved.float().norm().clamp_min(1e-12))
        # Not "above": also what is no number is no match.
        if not difference <= TOLERANCES[cache.parts.dtype]:
            raise ConfigError(
                f"open: the cache must be of this model, but the {what} of its first tokens differ "
                f"by {difference:.1e} in layer {index}: other weights, an adapter, another "
                "precision or other positions; open it with the model that it was made by "
                "(probe=False skips this)"
            )
        most = max(most, difference)
    return f"passed: keys and values of {count} tokens differ by at most {most:.0e} of their norm"


def _unexplained(apart: torch.Tensor, saved: torch.Tensor, config: SwapConfig) -> torch.Tensor:
    """What rounding by half a step does not explain of a difference, ``[kv_heads, n, dim]``."""
    match config.storage.kv_dtype:
        case "fp8_e4m3":  # a step of e4m3: three bits after the first
            return (apart.abs() - saved.abs() / 15).relu()
        case "int4":
            steps = int4_steps(saved, config.selection.group_tokens)
            # Another scale may have been its neighbour, an eighth larger.
            return (int4_rotated(apart).abs() - 0.5 * 1.125 * steps).relu()
    return apart


def _pairs(
    cache: KVSwapCache, sequence: int, ids: torch.Tensor
) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor]]:
    """Layer, "keys" or "values", what was saved and what is computed, ``[kv_heads, n, dim]``."""
    count, computed = ids.shape[1], _computed(cache, ids)
    for index, layer in enumerate(cache.layers):
        fresh = computed.layers[index]
        if index in cache.parts.disk_index:
            number = cache.parts.disk_index[index]
            saved = cache.parts.cached(*cache.driver.session.read_back(number, 0, count))
            for what, before, now in zip(
                ("keys", "values"), saved, (fresh.keys, fresh.values), strict=True
            ):
                yield index, what, before[sequence], now[0]
            if isinstance(layer, IndexedLayer) and layer.index_keys.is_initialized:
                before = layer.index_keys.keys[sequence, 0, :count]
                yield index, "keys of the index", before, fresh.indexer_keys[0]
        elif type(layer) in KINDS and layer.get_seq_length() > 0:
            first = layer.get_seq_length() - layer.keys.shape[-2]
            for what in ("keys", "values"):
                before = getattr(layer, what)[sequence, :, : max(0, count - first)]
                if before.shape[-2] > 0:
                    now = getattr(fresh, what)[0, :, first : first + before.shape[-2]]
                    yield index, what, before, now


def _computed(cache: KVSwapCache, ids: torch.Tensor) -> DynamicCache:
    """Of these tokens, all of them in every layer that has keys."""
    parts = cache.parts
    fresh = DynamicCache(config=parts.config)
    for layer in fresh.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
    ids = ids.to(parts.device)
    with torch.no_grad(), torch.autocast(parts.device.type, enabled=False):
        parts.decoder(input_ids=ids, **cache_argument(parts.decoder, fresh), use_cache=True)
    return fresh


def _before_an_image(cache: KVSwapCache, ids: torch.Tensor) -> int:
    """How many of the first tokens are text."""
    known = placeholders(cache.parts)
    return next((at for at, token in enumerate(ids.tolist()) if token in known), len(ids))


def _without_padding(valid: torch.Tensor | None, count: int, batch: int) -> int | None:
    """A sequence whose first `count` positions are tokens."""
    if valid is None:
        return 0
    whole = (i for i in range(batch) if bool(valid[i, :count].all()))
    return next(whole, None)
