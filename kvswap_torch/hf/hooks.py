"""The forward hooks of one cache: who runs, with which cache, and what the next layer may need."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kvswap_torch.hf import passes
from kvswap_torch.hf.attention import NAME, Switch
from kvswap_torch.hf.pieces import read_first_pieces

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache


class Hooks:
    """Hooks on a model's decoder and attention modules that serve one cache.

    They refer to the cache weakly and do nothing in a forward pass with another one, in no thread.
    """

    def __init__(self, cache: KVSwapCache, switch: Switch):
        self._handles: list[RemovableHandle] = []
        parts = cache.parts
        for module in {parts.outermost, parts.outermost.base_model, parts.decoder}:
            self._add(module.register_forward_pre_hook, _Enter(cache, switch))
            self._add(module.register_forward_hook, _Leave(cache, switch), always_call=True)
        for index, mixer in enumerate(parts.mixers):
            if mixer is not None:
                self._add(mixer.register_forward_pre_hook, _Before(cache, switch, index))
        for index, norm in cache.norms_after_attention().items():
            self._add(norm.register_forward_pre_hook, _AfterAttention(cache, switch, index))

    def _add(self, register: Any, hook: _Hook, **options: Any) -> None:
        self._handles.append(register(hook, with_kwargs=True, **options))

    def remove(self) -> None:
        """Takes all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hook:
    """One module's hook for one cache.

    A copy of the model copies its hooks and its config. The copy's do nothing, and its attention
    implementation is the one that the model had before.
    """

    def __init__(self, cache: KVSwapCache, switch: Switch):
        self._cache = weakref.ref(cache)
        self._switch = switch

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """`call`: args, kwargs and, after the pass, its output.

        While another thread puts hooks on or takes them off, torch may call one without kwargs. A
        pass of this thread's is then not with this cache, which is only just opened, or closed.
        """
        cache = self._cache()
        if cache is not None and len(call) >= self.arguments:
            return self.run(cache, module, *call)
        return None

    def __reduce__(self) -> Any:
        raise TypeError(
            "KVSwapCache: must be closed before its model is pickled, as torch.save() does, since "
            "its hooks serve this process alone; save_pretrained() may be called at any time"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        config = self._switch.config
        if config is not None:
            copied = copy.deepcopy(config, memo)
            if copied._attn_implementation == NAME:
                copied._attn_implementation = self._switch.previous
        return _nothing


class _Enter(_Hook):
    """Masks made from here on are for this cache, or for another one.

    Of a long prompt the first pieces are read before; the pass itself has the last one.
    """

    arguments = 2

    def run(self, cache: KVSwapCache, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if not _uses(cache, args, kwargs):
            passes.end(cache)
            return None
        is_outer = cache.begin_pass(module, args, kwargs)
        passes.begin(cache)
        last = read_first_pieces(cache, module, args, kwargs) if is_outer else None
        if last is None:
            return None
        passes.begin(cache)  # the decoder's own passes have ended
        return args, last


class _Leave(_Hook):
    """Called after a failed pass too, with no output."""

    arguments = 3

    def run(self, cache, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if _uses(cache, args, kwargs):
            passes.end(cache)
            cache.end_pass(module, is_whole=output is not None)


class _Before(_Hook):
    """Before one attention module: arms the cache's layer and looks ahead to the next one."""

    arguments = 2

    def __init__(self, cache: KVSwapCache, switch: Switch, index: int):
        super().__init__(cache, switch)
        self._index = index

    def run(self, cache: KVSwapCache, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if _uses(cache, args, kwargs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            cache.before_layer(self._index, module, hidden, kwargs)
        else:
            passes.attend_elsewhere(module, cache.layers)


class _AfterAttention(_Before):
    """Before the norm that reads the residual after attention: predicts for the next layer."""

    def run(self, cache: KVSwapCache, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if args and passes.is_with(cache):
            cache.after_attention(self._index, args[0])


def _nothing(*call: Any) -> None:
    """What a copied hook does."""


def _uses(cache: KVSwapCache, args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(value is cache for value in (*args, *kwargs.values()))
