"""Between a cache on disk and transformers' own in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvswap_torch.hf.indexed import IndexedLayer
from kvswap_torch.hf.layer import DiskLayer

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache


class Converting:
    """The part of `KVSwapCache` that comes from, and goes to, a cache in memory."""

    @classmethod
    def from_cache(
        cls: type[KVSwapCache],
        model: Any,
        cache: Any,
        path: str | Path | None = None,
        attention_mask: torch.Tensor | None = None,
        **arguments: Any,
    ) -> KVSwapCache:
        """A cache on disk with what a `DynamicCache` of the same model holds; that one stays.

        Parameters
        ----------
        cache
            The model's, with layers of equal length.
        attention_mask
            ``[batch, tokens]``, False where a token is padding; None: none is.
        path, arguments
            As for `KVSwapCache`.

        Raises
        ------
        ValueError
            `cache` is empty or another model's, or the mask has another shape.
        """
        made = cls(model, path, **arguments)
        try:
            fill(made, cache, attention_mask)
        except BaseException:
            made.close()
            raise
        return made

    def to_dynamic(self: KVSwapCache) -> DynamicCache:
        """A cache in memory with what this one holds; both can go on, each for itself."""
        return read(self)


def fill(cache: KVSwapCache, source: Any, attention_mask: torch.Tensor | None) -> None:
    """Writes what `source` holds to an empty cache; `source` stays as it is.

    Raises
    ------
    ValueError
        `source` is another model's, or its layers hold different lengths.
    """
    layers = list(source.layers)
    if len(layers) != len(cache.layers):
        raise ValueError(
            f"from_cache: must be given a cache of {cache.parts.name}, with {len(cache.layers)} "
            f"layers, got one with {len(layers)}"
        )
    disk = [layers[index] for index in cache.parts.disk]
    if not all(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in disk):
        raise ValueError("from_cache: must be given a cache that holds tokens, got an empty one")
    _check(cache, disk)
    batch, _, tokens, _ = disk[0].keys.shape
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DiskLayer):
            continue
        if type(layers[index]) is not type(layer):
            raise ValueError(
                f"from_cache: layer {index} must be a {type(layer).__name__}, got a "
                f"{type(layers[index]).__name__}; make the cache with DynamicCache(config=...)"
            )
        cache.layers[index] = copy.deepcopy(layers[index])
    with torch.no_grad():
        cache.driver.begin_forward(batch, tokens, attention_mask)
        for number, layer in enumerate(disk):
            cache.driver.store(number, *cache.parts.stored(layer.keys, layer.values))
            if getattr(layer, "is_indexer_initialized", False):
                cache.layers[cache.parts.disk[number]].keep_index(layer.indexer_keys)


def _check(cache: KVSwapCache, disk: list[Any]) -> None:
    dtype = cache.parts.dtype
    batch, _, tokens, _ = disk[0].keys.shape
    shapes = cache.parts.cached_shapes(batch, tokens)
    for index, layer in zip(cache.parts.disk, disk, strict=True):
        for tensor, expected in zip((layer.keys, layer.values), shapes, strict=True):
            if tensor.shape != expected or tensor.dtype != dtype:
                raise ValueError(
                    f"from_cache: layer {index} of {cache.parts.name} must hold {list(expected)} "
                    f"of {dtype}, got {list(tensor.shape)} of {tensor.dtype}"
                )


def read(cache: KVSwapCache) -> DynamicCache:
    """A cache in memory with all that `cache` holds, which stays as it is."""
    cache._make_usable()
    dynamic = DynamicCache(config=cache.parts.config)
    positions = cache.driver.positions()
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DiskLayer):
            dynamic.layers[index] = copy.deepcopy(layer)
        elif positions:
            keys, values = cache.driver.session.read_back(layer.disk_index, 0, positions)
            dynamic.layers[index].update(*cache.parts.cached(keys, values))
            if isinstance(layer, IndexedLayer) and layer.index_keys.is_initialized:
                dynamic.layers[index].update_indexer(layer.index_keys.keys.squeeze(1).clone())
    return dynamic
