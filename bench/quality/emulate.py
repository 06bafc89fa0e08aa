"""Runs a model over a document once, and over what follows it under any method.

The document is read with the full cache. A sample's tokens then run through the model all at once,
teacher-forced, and each row attends to what the method lets it see: what greedy decoding token by
token would compute, as long as its tokens are the expected ones. Plain torch, no disk; a test holds
it equal to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from bench.quality.row_attention import attend_all, attend_chosen, attend_chunk
from bench.quality.view import LayerPast, View
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf.attention import Switch
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.lookahead import LookAhead

ATTENTION = "kvswap_quality"  # as transformers knows it
CHUNK = 4096  # tokens read at once
QUERIES_KEPT = 64  # of the document's end, for methods that look at it


class Method(Protocol):
    """Who is attended."""

    def choose(self, view: View) -> torch.Tensor | None:
        """``[batch, 1 or kv_heads, n, columns]`` bool: what each row attends; None: everything."""


Observer = Callable[[View, torch.Tensor | None], None]


class Past:
    """A document that was read: its keys and values in every layer."""

    def __init__(self, layers: list[LayerPast]):
        self.layers = layers

    @property
    def tokens(self) -> int:
        return self.layers[0].tokens

    def forget(self) -> None:
        """Drops what methods made of it."""
        for layer in self.layers:
            layer.forget()


class Emulation:
    """One model on our attention function. A context manager: afterwards it is as before.

    Parameters
    ----------
    model
        A transformers model on the CPU whose layers all have full attention.

    Raises
    ------
    UnsupportedModelError
        Naming what stands in the way.
    """

    def __init__(self, model: Any):
        self.model = model
        self.parts = model_parts(model)
        if len(self.parts.disk) != len(self.parts.mixers):
            raise UnsupportedModelError(
                f"quality: every layer of {self.parts.name} must have full attention, has it in "
                f"{len(self.parts.disk)} of {len(self.parts.mixers)}; other layers keep a state "
                "that is not emulated"
            )
        # A small budget keeps heads apart: some methods score each head for itself.
        self._look_ahead = LookAhead(self.parts, kv_memory_bytes=1)
        self._predicted: dict[int, torch.Tensor | None] = {}
        self._attend: Callable[..., torch.Tensor] | None = None

    def __enter__(self) -> Emulation:
        _register()
        decoder = self.parts.decoder
        self._previous = decoder.config._attn_implementation
        decoder.set_attn_implementation(ATTENTION)
        # The generic prediction runs the next attention under the product's own implementation.
        self._switch = Switch.acquire(self.parts)
        self._handles = [
            mixer.register_forward_pre_hook(self._predict_after(index), with_kwargs=True)
            for index, mixer in enumerate(self.parts.mixers)
        ]
        for mixer in self.parts.mixers:
            _emulating[mixer] = self
        return self

    def __exit__(self, *error: object) -> None:
        for mixer in self.parts.mixers:
            _emulating.pop(mixer, None)
        for handle in self._handles:
            handle.remove()
        self._switch.release()
        self.parts.decoder.set_attn_implementation(self._previous)

    @torch.inference_mode()
    def read(self, ids: torch.Tensor) -> Past:
        """Reads a document ``[tokens]`` with the full cache."""
        reading = _Reading(len(self.parts.mixers))
        for first in range(0, len(ids), CHUNK):
            chunk = ids[first : first + CHUNK]
            with self._attending(reading.attend):
                self._run(self.parts.decoder, chunk[None], first)
        return Past([layer.finish() for layer in reading.layers])

    @torch.inference_mode()
    def follow(
        self, past: Past, ids: torch.Tensor, method: Method, observe: Observer, keep: int
    ) -> torch.Tensor:
        """Lets samples follow a document under a method.

        Parameters
        ----------
        ids
            ``[batch, n]``; shorter samples are padded at their end.
        observe
            Called once a layer with what was seen and chosen; must copy what it keeps.
        keep
            Rows at the end that logits are wanted of.

        Returns
        -------
        Tensor
            ``[batch, keep, vocabulary]`` fp32 logits.
        """

        def attend(layer: int, query, keys, values, scale: float) -> torch.Tensor:
            predicted = self._predicted.pop(layer, None)
            view = View(layer, query, predicted, keys, values, past.layers[layer], scale)
            mask = method.choose(view)
            observe(view, mask)
            return attend_all(view) if mask is None else attend_chosen(view, mask)

        with self._attending(attend):
            return self._run(self.model, ids, past.tokens, logits_to_keep=keep).logits.float()

    def _run(self, module: nn.Module, ids: torch.Tensor, first: int, **arguments: Any) -> Any:
        positions = first + torch.arange(ids.shape[1]).expand(len(ids), -1)
        return module(input_ids=ids, position_ids=positions, use_cache=False, **arguments)

    @contextmanager
    def _attending(self, attend: Callable[..., torch.Tensor]) -> Iterator[None]:
        self._attend = attend
        try:
            yield
        finally:
            self._attend = None
            self._predicted.clear()

    def _predict_after(self, index: int) -> Callable[..., None]:
        def predict_next(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if index + 1 == len(self.parts.mixers) or self._attend is None:
                return
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self._predicted[index + 1] = self._look_ahead.predict(index + 1, index, hidden, kwargs)

        return predict_next

    def attention(self, module: nn.Module, query, keys, values, scale: float) -> torch.Tensor:
        """``[batch, n, heads, head_dim]``: whatever runs now says how."""
        layer = next(i for i, mixer in enumerate(self.parts.mixers) if mixer is module)
        if self._attend is None:
            raise RuntimeError("quality: the model must be run by read() or follow()")
        return self._attend(layer, query, keys, values, scale).transpose(1, 2).contiguous()


class _Reading:
    """Keys and values of a document while it is read."""

    def __init__(self, layers: int):
        self.layers = [_LayerReading() for _ in range(layers)]

    def attend(self, layer: int, query, keys, values, scale: float) -> torch.Tensor:
        return self.layers[layer].attend(query, keys, values, scale)


class _LayerReading:
    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []  # [1, kv_heads, tokens of a chunk, head_dim]
        self._values: list[torch.Tensor] = []
        self._first_query: torch.Tensor | None = None
        self._last_query: torch.Tensor | None = None

    def attend(self, query, keys, values, scale: float) -> torch.Tensor:
        before = (torch.cat(self._keys, 2), torch.cat(self._values, 2)) if self._keys else None
        self._keys.append(keys)
        self._values.append(values)
        self._first_query = query if self._first_query is None else self._first_query
        kept = query if self._last_query is None else torch.cat([self._last_query, query], 2)
        self._last_query = kept[:, :, -QUERIES_KEPT:].clone()
        return attend_chunk(query, keys, values, before, scale)

    def finish(self) -> LayerPast:
        keys, values = (
            torch.cat(parts, 2)[0].transpose(0, 1).contiguous()
            for parts in (self._keys, self._values)
        )
        return LayerPast(keys, values, self._first_query, self._last_query)


_emulating: dict[nn.Module, Emulation] = {}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; masks are made here, since columns are not the keys'."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("quality: scores must be products alone, got a cap or sinks")
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return _emulating[module].attention(module, query, key, value, scale), None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda **_: None)
