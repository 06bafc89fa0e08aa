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

from kvswap_torch.errors import UnsupportedModelError
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
    softcap, sinks
        What else becomes of them, as `attention_weights` has it.
    values
        As `keys`.
    """

    layer: int
    query: torch.Tensor
    predicted: torch.Tensor | None
    keys: torch.Tensor
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    values: torch.Tensor | None = None


Observer = Callable[[Observed], None]
"""Called once a layer and sample, in order of the layers; must copy what it keeps."""


ATTENTION = "kvswap_calibration"  # as transformers knows it
ROWS = 256  # queries attended at a time: their scores are [heads, ROWS, tokens]


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
        if self.parts.latent is not None:
            raise UnsupportedModelError(
                f"kvswap-tune: {self.parts.name} has multi-head latent attention, whose latents "
                "calibration does not see; open a cache without a config, which estimates its "
                "projections from each prompt"
            )

    def read(self, sample: Sample, observer: Observer) -> torch.Tensor:
        """Lets the model read a sample; the observer is called once a layer.

        Returns the decoder's output, after its last norm, ``[1, tokens, hidden]``. The model is as
        before afterwards, also when the observer raises.
        """
        with self._watched(observer), torch.no_grad():
            return self.parts.decoder(input_ids=sample.ids[None], use_cache=False)[0]

    @contextmanager
    def _watched(self, observer: Observer) -> Iterator[None]:
        from kvswap_torch.hf.attention import Switch
        from kvswap_torch.hf.lookahead import LookAhead

        _register()
        decoder = self.parts.decoder
        previous = decoder.config._attn_implementation
        watch = _Watch(self.parts, LookAhead(self.parts, by_sum=False), observer)
        decoder.set_attn_implementation(ATTENTION)
        # The generic prediction runs the next attention under our own implementation.
        switch = Switch.acquire(self.parts)
        try:
            with watch:
                yield
        finally:
            switch.release()
            decoder.set_attn_implementation(previous)


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

    def attended(
        self, module: nn.Module, query: Any, keys: Any, scale: float, **terms: Any
    ) -> None:
        index = next(i for i in self._parts.disk if self._parts.mixers[i] is module)
        self._observer(
            Observed(
                layer=self._parts.disk_index[index],
                query=query,
                predicted=self._predicted.pop(index, None),
                keys=keys,
                scale=scale,
                **terms,
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
    """transformers' attention interface: shows query and key, then attends to all."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    terms = {"softcap": kwargs.get("softcap") or 0.0, "sinks": kwargs.get("s_aux")}
    watch = _watching.get(module)
    if watch is not None:
        watch.attended(module, query, key, scale, values=value, **terms)
    if terms["softcap"] or terms["sinks"] is not None:
        return _full_attention(query, key, value, attention_mask, scale, **terms), None
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def _full_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax of capped scores with sinks beside them, and what it holds of the values.

    Parameters
    ----------
    query
        ``[batch, heads, tokens, head_dim]``.
    keys, values
        ``[batch, kv_heads, tokens, head_dim]``.
    mask
        ``[batch, 1, tokens, tokens]`` bool, True where a query may look; None: causal.
    softcap, sinks
        As `attention_weights`.

    Returns
    -------
    Tensor
        ``[batch, tokens, heads, head_dim]``.
    """
    tokens, repeats = query.shape[2], query.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(repeats, 1) for each in (keys, values))
    column = torch.arange(tokens)
    parts = []
    for rows in column.split(ROWS):
        hidden = column > rows[:, None] if mask is None else ~mask[:, :, rows]
        scores = query[:, :, rows].float() @ keys.transpose(2, 3) * scale
        parts.append(attention_weights(scores, hidden, softcap, sinks) @ values)
    return torch.cat(parts, 2).transpose(1, 2).to(query.dtype)


def attention_weights(
    scores: torch.Tensor,
    hidden: torch.Tensor,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """A softmax over tokens as models with such terms make it.

    Parameters
    ----------
    scores
        ``[..., heads, queries, tokens]`` fp32.
    hidden
        Broadcasts to it: True where a token is not looked at.
    softcap
        Scores become ``softcap * tanh(score / softcap)`` (Gemma 2, section 2); 0: they stay.
    sinks
        ``[heads]``: a score beside the tokens' that takes its share (gpt-oss); None: none.

    Returns
    -------
    Tensor
        As `scores`. With sinks rows sum to less than 1.
    """
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
