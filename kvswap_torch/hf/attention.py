"""The attention and mask functions named "kvswap", and the switch that puts a model on them.

They are registered once and stay. While a cache of a model is open, the model's attention
implementation is "kvswap"; what does not belong to an open cache (another cache, no cache, a
sliding layer) is handed to the implementation the model had before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvswap_torch.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvswap_torch.hf.families import ModelParts
    from kvswap_torch.hf.layer import DiskLayer

NAME = "kvswap"

# Which layer of an open cache the next attention of a module belongs to; set by its pre-hook.
attending: WeakKeyDictionary[nn.Module, DiskLayer] = WeakKeyDictionary()
# Modules whose attention is called only to learn their query, and what takes it.
capturing: WeakKeyDictionary[nn.Module, Callable[[torch.Tensor], None]] = WeakKeyDictionary()


class Switch:
    """Puts one decoder's config on "kvswap" while at least one of its caches is open.

    States: count 0, the config has its own implementation; count > 0, it has ours. One switch per
    config object, since that is where transformers looks the implementation up.
    """

    _by_config: ClassVar[dict[int, Switch]] = {}

    def __init__(self, parts: ModelParts):
        self.config = parts.config
        self.decoder = parts.decoder
        self.previous: str = parts.config._attn_implementation
        self.windows = parts.windows
        self.count = 0
        self.in_forward = False  # between a decoder's start and end, with one of our caches

    @classmethod
    def of(cls, config: Any) -> Switch | None:
        return cls._by_config.get(id(config))

    @classmethod
    def acquire(cls, parts: ModelParts) -> Switch:
        """Switches on, or counts one more cache. Nothing has changed when it raises."""
        switch = cls.of(parts.config)
        if switch is None:
            register()
            switch = cls(parts)
            parts.decoder.set_attn_implementation(NAME)
            if parts.config._attn_implementation != NAME:
                raise UnsupportedModelError(
                    f"KVSwapCache: {parts.name} computes attention itself, not through the "
                    "attention interface"
                )
            cls._by_config[id(parts.config)] = switch
        switch.count += 1
        return switch

    def release(self) -> None:
        """One cache less; the last one gives the model its own implementation back."""
        self.count -= 1
        if self.count == 0:
            del self._by_config[id(self.config)]
            if self.config._attn_implementation == NAME:
                self.decoder.set_attn_implementation(self.previous)


def register() -> None:
    """Makes "kvswap" known to transformers. Again does nothing new."""
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
    take = capturing.get(module)
    if take is not None:
        take(query)
    layer = attending.get(module)
    if layer is None:
        return _previous_attention(module)(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(module, query, attention_mask, **kwargs), None


def mask(**kwargs: Any) -> Any:
    """transformers' mask interface: for layers on disk only the padding, never [tokens, tokens].

    Returns
    -------
    Tensor or None
        ``[batch, columns]`` bool for a plain causal mask in a forward pass with one of our caches;
        otherwise what the model's own implementation makes of it.
    """
    switch = Switch.of(kwargs.get("config"))
    if switch is not None and switch.in_forward and _is_causal(switch, kwargs):
        return kwargs.get("attention_mask")
    name = switch.previous if switch else "sdpa"
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None  # as transformers does for an implementation without a mask function
    return ALL_MASK_ATTENTION_FUNCTIONS[name](**kwargs)


def _is_causal(switch: Switch, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("local_size") is None:
        return kwargs.get("mask_function") in (None, causal_mask_function)
    # An overlay on a window cannot be seen, but it forbids the skip.
    plain = kwargs.get("allow_is_causal_skip", True) and not kwargs.get("use_vmap", False)
    return plain and kwargs["local_size"] in switch.windows


def _previous_attention(module: nn.Module) -> Callable[..., Any]:
    switch = Switch.of(getattr(module, "config", None))
    name = switch.previous if switch else "sdpa"
    # Eager attention is each modeling file's own.
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
