"""What this thread runs now: which cache its forward pass is with, and whose attention is next.

Threads share a model with its hooks, config and attention function. What is said here each has for
itself, so that a pass of one thread never counts for another's. Everything is held weakly: a pass
that was interrupted keeps nothing alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache
    from kvswap_torch.hf.layer import DiskLayer


class _Here(threading.local):
    cache: weakref.ref[KVSwapCache] | None = None
    attending: tuple[weakref.ref[nn.Module], weakref.ref[DiskLayer]] | None = None
    # Sees what the attention function is called with, and may answer in its place.
    observer: Callable[..., torch.Tensor | None] | None = None


here = _Here()


def begin(cache: Any) -> None:
    """A forward pass with `cache` begins: masks are made for it from here on."""
    here.cache = weakref.ref(cache)


def end(cache: Any) -> None:
    """The pass is over, or this one is not with `cache`; another cache's stays while it runs."""
    begun = here.cache and here.cache()
    # A Ctrl-C runs no hook, and the hooks of a cache that was closed since run no more.
    if begun is None or begun is cache or not begun.is_in_pass:
        here.cache = here.attending = None


def is_with_ours(config: Any) -> bool:
    """Whether this thread runs the decoder of that config with one of our caches."""
    cache = here.cache and here.cache()
    return cache is not None and cache.parts.config is config


def is_with(cache: KVSwapCache) -> bool:
    """Whether this thread runs a pass with `cache`."""
    return here.cache is not None and here.cache() is cache


def has_index() -> bool:
    """Whether the model of this thread's pass chooses by an index of its own what it attends."""
    cache = here.cache and here.cache()
    return cache is not None and cache.parts.index_topk > 0


def attend_next(module: nn.Module, layer: DiskLayer) -> None:
    """`module` is about to attend over `layer`."""
    here.attending = weakref.ref(module), weakref.ref(layer)


def attend_elsewhere(module: nn.Module, layers: list[Any]) -> None:
    """`module` is about to run without the cache of these layers: what was said of them is over."""
    layer = layer_of(module)
    if layer is not None and any(layer is each for each in layers):
        here.attending = None


def layer_of(module: nn.Module) -> DiskLayer | None:
    """The layer that `module` attends over on this thread; None: a foreign cache's, or none."""
    if here.attending is None:
        return None
    expected, found = (reference() for reference in here.attending)
    if expected is not module or found is None:
        return None
    # A cache that was closed since this pass gave it keys must not be passed over in silence.
    return found if found.driver.is_open or found.has_pending else None
