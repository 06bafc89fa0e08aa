"""The full cache in memory, which other caches are compared with."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, __version__

from kvswap_torch.errors import UnsupportedModelError

TRANSFORMERS = __version__


def full_cache(model: Any, where: str) -> DynamicCache:
    """An empty one, that can be cropped back to a document after each question.

    Raises
    ------
    UnsupportedModelError
        For a model with sliding windows, of which a crop finds nothing again; `where` begins it.
    """
    cache = DynamicCache(config=model.config)
    if any(cache.is_sliding):
        raise UnsupportedModelError(
            f"{where}: {type(model).__name__} must have full attention in every layer, has it in "
            f"{cache.is_sliding.count(False)} of {len(cache.is_sliding)}"
        )
    return cache
