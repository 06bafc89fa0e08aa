"""The forward hooks of one cache: who runs, with which cache, and what the next layer may need."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kvswap_torch.hf.attention import Switch, attending

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache


class Hooks:
    """Hooks on a model's decoder and attention modules that serve one cache.

    They refer to the cache weakly and do nothing in a forward pass with another one.
    """

    def __init__(self, cache: KVSwapCache, switch: Switch):
        self._cache = weakref.ref(cache)
        self._switch = switch
        self._modules: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        parts = cache.parts
        for module in {parts.outermost, parts.outermost.base_model, parts.decoder}:
            self._add(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            leave = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._add(leave)
        for index, mixer in enumerate(parts.mixers):
            if mixer is not None:
                self._modules.append(mixer)
                hook = _Before(self._cache, index)
                self._add(mixer.register_forward_pre_hook(hook, with_kwargs=True))

    def _add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Masks made from here on are for this cache, or for another one."""
        cache = self._cache()
        if cache is None:
            return
        if _uses(cache, args, kwargs):
            cache.driver.check_open()
            self._switch.in_forward = True
            if module is cache.parts.decoder:
                cache.begin_pass()

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Called after a failed pass too, with no output."""
        self._switch.in_forward = False
        cache = self._cache()
        if cache is not None and output is not None and _uses(cache, args, kwargs):
            cache.end_pass()

    def remove(self) -> None:
        """Takes all hooks off again."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            attending.pop(module, None)
        self._handles.clear()
        self._modules.clear()


class _Before:
    """Before one attention module: arms the cache's layer and looks ahead to the next one."""

    def __init__(self, cache: weakref.ref[KVSwapCache], index: int):
        self._cache = cache
        self._index = index

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        cache = self._cache()
        if cache is None:
            return
        if not _uses(cache, args, kwargs):
            layer = attending.get(module)
            if layer is not None and layer.driver is cache.driver:
                del attending[module]
            return
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache.before_layer(self._index, module, hidden, kwargs)


def _uses(cache: KVSwapCache, args: tuple, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("past_key_values") is cache:
        return True
    return any(value is cache for value in (*args, *kwargs.values()))
