"""The attention and mask functions named "kvswap", and the switch that puts a model on them.

They are registered once and stay. While a cache of a model is open, the model's attention
implementation is "kvswap"; what does not belong to an open cache (another cache, no cache, a
sliding layer) is handed to the implementation the model had before.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvswap_torch.errors import KVSwapError, UnsupportedModelError
from kvswap_torch.hf import passes

if TYPE_CHECKING:
    from kvswap_torch.hf.families import ModelParts

NAME = "kvswap"
CUT_BY_MASK = ("eager", "sdpa")  # implementations that are not told what an index has chosen


class Switch:
    """Puts one decoder's config on "kvswap" while at least one of its caches is open.

    States: count 0, the config has its own implementation; count > 0, it has ours. One switch per
    config object, since that is where transformers looks the implementation up. It stays as long
    as the config: another thread may be between looking ours up and calling it.
    """

    _by_config: ClassVar[dict[int, Switch]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()  # a collected cache may release in acquire

    def __init__(self, config: Any):
        key, switches = id(config), self._by_config
        self._config = weakref.ref(config, lambda _: switches.pop(key, None))
        self._decoder: Any = None  # held only while the count is above 0
        self.previous: str = config._attn_implementation
        self.windows: frozenset[int] = frozenset()
        self.count = 0

    @classmethod
    def of(cls, config: Any) -> Switch | None:
        switch = cls._by_config.get(id(config))
        return switch if switch is not None and switch._config() is config else None

    @property
    def config(self) -> Any:
        return self._config()

    @classmethod
    def acquire(cls, parts: ModelParts) -> Switch:
        """Switches on, or counts one more cache. Nothing has changed when it raises."""
        register()
        with cls._lock:
            switch = cls.of(parts.config)
            if switch is None:
                switch = cls._by_config[id(parts.config)] = cls(parts.config)
            switch.count += 1
            try:
                switch._turn_on(parts)
            except BaseException:
                switch.count -= 1
                raise
            return switch

    def _turn_on(self, parts: ModelParts) -> None:
        if parts.config._attn_implementation == NAME:
            return
        self.previous = parts.config._attn_implementation
        self.windows = parts.windows
        parts.decoder.set_attn_implementation(NAME)
        if parts.config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"KVSwapCache: {parts.name} computes attention itself, not through the "
                "attention interface"
            )
        self._decoder = parts.decoder

    def release(self) -> None:
        """One cache less; the last one gives the model its own implementation back."""
        with self._lock:
            self.count -= 1
            if self.count == 0:
                decoder, self._decoder = self._decoder, None
                if decoder is not None and decoder.config._attn_implementation == NAME:
                    decoder.set_attn_implementation(self.previous)


def check_switched(config: Any) -> None:
    """A pass with a cache needs the model on our attention function."""
    if config._attn_implementation != NAME:
        raise KVSwapError(
            f"KVSwapCache: the model's attention must stay {NAME!r} while a cache is open, got "
            f"{config._attn_implementation!r} from set_attn_implementation(); close the cache "
            "first: other caches go on with what the model had"
        )


def refuse_weights(config: Any, kwargs: dict[str, Any]) -> None:
    """A pass that asks for attention weights, which the model would show with another cache."""
    asked = kwargs.get("output_attentions", getattr(config, "output_attentions", False))
    switch = Switch.of(config)
    if asked and switch is not None and switch.previous == "eager":
        raise ValueError(
            "KVSwapCache: output_attentions must be false, since attention over what is on disk "
            "keeps no weights; a cache in memory shows them (to_dynamic())"
        )


def register() -> None:
    """Makes "kvswap" known to transformers. Idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface.

    Parameters
    ----------
    query
        ``[batch, heads, tokens, head_dim]`` after RoPE.
    key, value
        What the cache's `update` returned.

    Returns
    -------
    tuple
        ``[batch, tokens, heads, head_dim]`` and None: the weights are not kept.
    """
    observer = passes.here.observer
    if observer is not None:
        output = observer(module, query, key, value, attention_mask, kwargs)
        if output is not None:
            return output, None
    layer = passes.layer_of(module)
    if layer is None:
        attention_mask = _with_choice(module, key, attention_mask, kwargs.get("indices"))
        return _previous_attention(module)(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(module, query, key, value, attention_mask, **kwargs), None


def mask(**kwargs: Any) -> Any:
    """transformers' mask interface: for layers on disk only the padding, never [tokens, tokens].

    Returns
    -------
    Tensor or None
        ``[batch, positions]`` bool for a plain causal mask in a pass with one of our caches;
        otherwise what the model's own implementation makes of it.
    """
    config = kwargs.get("config")
    switch = Switch.of(config)
    is_ours = switch is not None and passes.is_with_ours(config)
    has_index = is_ours and passes.has_index()
    if is_ours and not has_index and _is_causal(switch, kwargs):
        return kwargs.get("attention_mask")
    # An index wants to know of every token which it may choose, in bools.
    name = switch.previous if switch and not has_index else "sdpa"
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None  # as transformers does for an implementation without a mask function
    return ALL_MASK_ATTENTION_FUNCTIONS[name](**kwargs)


def _is_causal(switch: Switch, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("local_size") is None:
        return kwargs.get("mask_function") in (None, causal_mask_function)
    # An overlay on a window cannot be seen, but it forbids the skip.
    plain = kwargs.get("allow_is_causal_skip", True) and not kwargs.get("use_vmap", False)
    return plain and kwargs["local_size"] in switch.windows


def _with_choice(
    module: nn.Module,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    indices: torch.Tensor | None,
) -> torch.Tensor | None:
    """The mask of a model with an index, which cuts it itself where eager or sdpa is its name."""
    switch = Switch.of(getattr(module, "config", None))
    if indices is None or mask is None or switch is None or switch.previous not in CUT_BY_MASK:
        return mask
    batch, queries, _ = indices.shape
    left_out = indices.new_ones((batch, queries, key.shape[2]), dtype=torch.bool)
    left_out = left_out.scatter(-1, indices.long(), False).unsqueeze(1)
    if mask.dtype == torch.bool:
        return mask & ~left_out
    return mask.masked_fill(left_out, torch.finfo(mask.dtype).min)


def _previous_attention(module: nn.Module) -> Callable[..., Any]:
    switch = Switch.of(getattr(module, "config", None))
    name = switch.previous if switch else "sdpa"
    # Eager attention is each modeling file's own.
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
