"""Whether a saved cache is this model's: the keys of its first tokens, computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.families import changes_with_length
from kvswap_torch.hf.vision_positions import placeholders

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache

TOKENS = 16
# Of the norm of the difference to that of the keys. Equal weights differ by rounding: sums are made
# in another order in a short pass. Another projection or rotation differs in the third digit.
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def probe(cache: KVSwapCache, ids: torch.Tensor | None, valid: torch.Tensor | None) -> str:
    """Compares; "passed" and how far apart keys were, or why nothing could be compared.

    Parameters
    ----------
    ids
        ``[batch, positions]``; None: not known.
    valid
        ``[batch, positions]`` bool; None: no padding.

    Raises
    ------
    ConfigError
        The keys are another model's.
    """
    if ids is None:
        return "skipped: the cache was made from embeddings or another cache, and has no token ids"
    if changes_with_length(cache.parts):
        return "skipped: this model rotates keys by the length of the text"
    count = min(TOKENS, ids.shape[1])
    sequence = _without_padding(valid, count, ids.shape[0])
    if sequence is None:
        return "skipped: every sequence begins with padding"
    count = _before_an_image(cache, ids[sequence, :count])
    if count == 0:
        return "skipped: the text begins with an image, or the like"
    computed = _keys(cache, ids[sequence : sequence + 1, :count])
    most = 0.0
    for number, index in enumerate(cache.parts.disk):
        saved = cache.driver.session.read_back(number, 0, count)[0][sequence].float()
        fresh = computed.layers[index].keys[0].float()
        apart = (fresh - saved).abs()
        if cache.driver.config.records == "fp8":
            # Half a step of e4m3, three bits after the first, is what rounding explains.
            apart = (apart - saved.abs() / 15).relu()
        difference = float(apart.norm() / saved.norm().clamp_min(1e-12))
        # Not "above": also what is no number is no match.
        if not difference <= TOLERANCES[cache.parts.dtype]:
            raise ConfigError(
                "open: the cache must be of this model, but the keys of its first tokens differ by "
                f"{difference:.1e} in layer {index}: other weights, an adapter, another precision "
                "or other positions; open it with the model that it was made by (probe=False "
                "skips this)"
            )
        most = max(most, difference)
    return f"passed: keys of {count} tokens differ by at most {most:.0e} of their norm"


def _keys(cache: KVSwapCache, ids: torch.Tensor) -> DynamicCache:
    parts = cache.parts
    fresh = DynamicCache(config=parts.config)
    ids = ids.to(parts.device)
    with torch.no_grad(), torch.autocast(parts.device.type, enabled=False):
        parts.decoder(input_ids=ids, past_key_values=fresh, use_cache=True)
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
