"""A long prompt in one forward pass, read in pieces where nobody sees all of it.

A pass over 16K tokens holds what each layer computes of all of them: for a small model more than
the whole KV cache. `generate()` asks for the last token's logits alone, so that all but the last
piece may go through the decoder before the pass itself does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvswap_torch.chunks import even_chunks

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache

PIECE_TOKENS = 4096  # as the commands read a document: what estimates are known to be good for

#: What may be given, and is divided by its last dimension; the mask is cut, not divided.
DIVIDED = ("input_ids", "position_ids", "cache_position")
WHOLE = ("past_key_values", "use_cache", "return_dict", "logits_to_keep")


def read_first_pieces(
    cache: KVSwapCache, module: Any, args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Reads all but the last piece of a pass that is about to run.

    Returns
    -------
    dict or None
        The arguments of the last piece; None: the pass stays whole.
    """
    pieces = _pieces(cache, module, args, kwargs)
    if not pieces:
        return None
    total = kwargs["input_ids"].shape[1]
    cache.driver.expected = total
    past = cache.driver.positions()
    *first, last = (_cut(kwargs, past, begin, end, total) for begin, end in pieces)
    for piece in first:
        cache.parts.decoder(**{name: piece[name] for name in piece if name != "logits_to_keep"})
    return last


def is_divided(cache: KVSwapCache) -> bool:
    """Whether what the cache holds of a prompt does not depend on how it came.

    Tokens that are kept for what a prompt's last queries paid, and clusters, are made of whole
    chunks. A recurrent state may compute other numbers.
    """
    config = cache.driver.config
    others = cache.layers_elsewhere()
    return (
        config.retention is None
        and config.clusters is None
        and not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in others)
    )


def _pieces(
    cache: KVSwapCache, module: Any, args: tuple, kwargs: dict[str, Any]
) -> list[tuple[int, int]]:
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    parts = cache.parts
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] <= PIECE_TOKENS:
        return []
    pieces = even_chunks(ids.shape[1], PIECE_TOKENS)
    kept = kwargs.get("logits_to_keep")
    last_tokens = pieces[-1][1] - pieces[-1][0]
    sees_last_alone = (
        not args
        and module is parts.outermost
        and module is not parts.decoder
        and getattr(module, "base_model", None) is parts.decoder
        and type(kept) is int
        and 0 < kept <= last_tokens
        and not torch.is_grad_enabled()
        and not _shows_layers(kwargs, parts.config)
    )
    known = {*DIVIDED, *WHOLE, "attention_mask"}
    has_others = any(
        value is not None and value is not False
        for name, value in kwargs.items()
        if name not in known
    )
    has_plain_mask = mask is None or mask.dim() == 2
    if not sees_last_alone or has_others or not has_plain_mask or not is_divided(cache):
        return []
    return pieces


def _shows_layers(kwargs: dict[str, Any], config: Any) -> bool:
    """Whether the pass returns what layers computed of every token."""
    names = ("output_hidden_states", "output_attentions")
    return any(kwargs.get(name, getattr(config, name, False)) for name in names)


def _cut(kwargs: dict[str, Any], past: int, begin: int, end: int, total: int) -> dict[str, Any]:
    """The arguments for tokens [begin, end) of the pass."""

    def cuts() -> Iterator[tuple[str, Any]]:
        for name, value in kwargs.items():
            if name in DIVIDED and value is not None and value.shape[-1] == total:
                yield name, value[..., begin:end]
            elif name == "attention_mask" and value is not None:
                yield name, value[:, : past + end]
            else:
                yield name, value

    return dict(cuts())
