"""Runs a model over samples and shows an observer every layer's queries and keys.

The only file here that knows transformers, and only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvswap_torch.tuning.samples import Sample


@dataclass(frozen=True)
class Observed:
    """One layer's queries and keys over one sample, after RoPE.

    Parameters
    ----------
    layer
        Its number among the layers on disk.
    query
        ``[1, heads, tokens, head_dim]``: what it attends with.
    predicted
        ``[1, heads or kv_heads, tokens, head_dim]``: that query as the engine predicts it
        from the layer before; None for layers that choose with their true query.
    keys
        ``[1, kv_heads, tokens, head_dim]``.
    scale
        Of the scores, before the softmax.
    """

    layer: int
    query: torch.Tensor
    predicted: torch.Tensor | None
    keys: torch.Tensor
    scale: float


Observer = Callable[[Observed], None]
"""Called once a layer and sample, in order of the layers; must copy what it keeps."""


ATTENTION = "kvswap_calibration"  # as transformers knows it


class Calibrator:
    """A model whose layers are watched.

    Each sample is one forward pass without a cache: of all layers' keys only one layer's are alive
    at a time, so memory does not grow with the number of layers or samples.

    Parameters
    ----------
    model
        A decoder-only transformers model on the CPU that `kvswap_torch.KVSwapCache` supports.

    Raises
    ------
    UnsupportedModelError
        Naming what stands in the way of keeping its cache on disk.
    """

    def __init__(self, model: Any):
        from kvswap_torch.hf.families import model_parts

        self.parts = model_parts(model)
        _refuse_terms(self.parts)

    def read(self, sample: Sample, observer: Observer) -> None:
        """Lets the model read a sample; the observer is called once a layer.

        The model is as before afterwards, also when the observer raises.
        """
        with self._watched(observer), torch.no_grad():
            self.parts.decoder(input_ids=sample.ids[None], use_cache=False)

    @contextmanager
    def _watched(self, observer: Observer) -> Iterator[None]:
        from kvswap_torch.hf.attention import Switch
        from kvswap_torch.hf.lookahead import LookAhead

        _register()
        decoder = self.parts.decoder
        previous = decoder.config._attn_implementation
        watch = _Watch(self.parts, LookAhead(self.parts, score="mass"), observer)
        decoder.set_attn_implementation(ATTENTION)
        # The generic prediction runs the next attention under our own implementation.
        switch = Switch.acquire(self.parts)
        try:
            with watch:
                yield
        finally:
            switch.release()
            decoder.set_attn_implementation(previous)


def _refuse_terms(parts: Any) -> None:
    """What is calibrated on is a softmax over products alone."""
    from kvswap_torch.hf.families import unsupported

    if getattr(parts.config, "attn_logit_softcapping", None):
        why = "caps attention scores (attn_logit_softcapping)"
    elif any(isinstance(getattr(parts.mixers[i], "sinks", None), torch.Tensor) for i in parts.disk):
        why = "has learned attention sinks"
    else:
        return
    why += ", which calibration does not know; use the model without a config"
    raise unsupported(parts.name, why)


class _Watch:
    """Hooks on the attention modules that put together what an observer is shown."""

    def __init__(self, parts: Any, look_ahead: Any, observer: Observer):
        self._parts = parts
        self._look_ahead = look_ahead
        self._observer = observer
        self._predicted: dict[int, torch.Tensor | None] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for index, mixer in enumerate(self._parts.mixers):
            if mixer is None:
                continue
            hook = self._before(index)
            self._handles.append(mixer.register_forward_pre_hook(hook, with_kwargs=True))
            if index in self._parts.disk_index:
                _watching[mixer] = self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for index in self._parts.disk:
            _watching.pop(self._parts.mixers[index], None)

    def _before(self, index: int) -> Any:
        def predict_next(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if index + 1 not in self._parts.disk_index:
                return
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            # The next module is asked for its query only: that must not count as a pass.
            watch = _watching.pop(self._parts.mixers[index + 1])
            try:
                query = self._look_ahead.predict(index + 1, index, hidden, kwargs)
            finally:
                _watching[self._parts.mixers[index + 1]] = watch
            self._predicted[index + 1] = query

        return predict_next

    def attended(self, module: nn.Module, query: Any, keys: Any, scale: float | None) -> None:
        index = next(i for i in self._parts.disk if self._parts.mixers[i] is module)
        self._observer(
            Observed(
                layer=self._parts.disk_index[index],
                query=query,
                predicted=self._predicted.pop(index, None),
                keys=keys,
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
            )
        )


_watching: dict[nn.Module, _Watch] = {}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: shows query and key, then attends as SDPA does."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    watch = _watching.get(module)
    if watch is not None:
        watch.attended(module, query, key, kwargs.get("scaling"))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
