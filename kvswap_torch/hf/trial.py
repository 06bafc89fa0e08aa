"""Whether a model's attention can be done from disk, tried on two tokens when a cache is opened.

What a family does between its projections and its attention cannot be read off its config: some
cache a latent, some change keys after they were cached, some attend twice. So the decoder runs on
two tokens with a cache that only looks, until one layer of every kind has attended. That is one
layer of most models.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, get_args

import torch
import transformers
from torch import nn
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf import passes
from kvswap_torch.hf.attention import Switch
from kvswap_torch.hf.families import ModelParts, unsupported
from kvswap_torch.hf.indexed import check_choice, refuse_terms
from kvswap_torch.hf.layer import refuse_options
from kvswap_torch.hf.offloaded import let_go

TOKENS = 2
# Of the norm: sums in another order, in bf16 or with weights of 8 bits that are widened.
EXPANSION_TOLERANCE = 2e-2

_passed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def try_attention(parts: ModelParts) -> None:
    """Tries a decoder once; the next cache of the same one is not held up.

    Raises
    ------
    UnsupportedModelError
        Naming what in its attention cannot be done from disk.
    """
    if parts.decoder in _passed:
        return
    trial = TrialCache(parts)
    switch = Switch.acquire(parts)
    passes.here.observer = trial.observe
    passes.begin(trial)
    try:
        _run(parts, trial)
        trial.finish()
    except _Enough:
        pass
    except UnsupportedModelError:
        raise
    except Exception as error:
        if own := _own_cache(parts.decoder):
            raise trial.fail(f"takes no cache but one of its own class, {own}") from error
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        if trial.stopped_in is not None:
            raise trial.fail(
                "changes keys, values or their mask between cache and attention "
                f"({trial.stopped_in}: {what})"
            ) from error
        raise unsupported(
            parts.name, f"cannot be run on token ids, a mask [batch, tokens] and a cache ({what})"
        ) from error
    finally:
        passes.here.observer = None
        passes.end(trial)
        switch.release()
        let_go(parts.decoder, recurse=True)
    _passed.add(parts.decoder)


def _run(parts: ModelParts, trial: TrialCache) -> None:
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=parts.device)
    inputs = {"input_ids": ids}
    if parts.placement.stage:  # later stages get what the one before has made of them
        size = (1, TOKENS, parts.config.hidden_size)
        inputs = {"inputs_embeds": torch.zeros(size, dtype=parts.dtype, device=parts.device)}
    with torch.no_grad(), torch.autocast(parts.device.type, enabled=False):
        parts.decoder(
            **inputs,
            attention_mask=torch.ones_like(ids),
            **cache_argument(parts.decoder, trial),
            use_cache=True,
        )


class _Enough(Exception):
    """One layer of every kind has attended as it must."""


class TrialCache(Cache):
    """Watches what reaches the cache and the attention function."""

    is_in_pass = True

    def __init__(self, parts: ModelParts):
        self.parts = parts
        # Before the pass: quantised weights may be packed anew in it.
        self._kinds = {index: _kind(parts.mixers[index]) for index in parts.disk}
        self._kinds_left = set(self._kinds.values())
        self._current: TrialLayer | None = None
        super().__init__(layers=[self._layer(index) for index in range(len(parts.kinds))])

    def _layer(self, index: int) -> Any:
        if index in self.parts.disk_index:
            return TrialLayer(self, index)
        return DYNAMIC_LAYER_TYPE_MAPPING[self.parts.kinds[index]](**self.parts.layer_kwargs[index])

    def fail(self, why: str) -> UnsupportedModelError:
        return unsupported(self.parts.name, why)

    def updates(self, layer: TrialLayer) -> None:
        """A layer's new keys and values have come: the layer before it is done."""
        if layer is self._current:
            raise self.fail("updates a layer's cache twice in one pass")
        self.finish_layer()
        self._current = layer
        shapes = self.parts.cached_shapes(1, TOKENS)
        if (layer.keys.shape, layer.values.shape) != shapes:
            keys, values = list(layer.keys.shape), list(layer.values.shape)
            must = " and ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.fail(
                f"caches keys of shape {keys} and values of shape {values} in layer "
                f"{layer.index}; all layers must have {must}{self._newer()}"
            )
        if layer.keys.dtype != self.parts.dtype or layer.values.dtype != self.parts.dtype:
            raise self.fail(f"has weights of {self.parts.dtype}, but caches {layer.keys.dtype}")

    def _newer(self) -> str:
        if self.parts.latent is None:
            return ""
        return f"; transformers {transformers.__version__} caches no latents of it, 5.23 does"

    def observe(
        self, module: nn.Module, query, key, value, mask: torch.Tensor | None, options: dict
    ) -> torch.Tensor | None:
        """What the attention function is called with; its result, or None for foreign layers."""
        layer = self._current
        if not any(module is self.parts.mixers[index] for index in self.parts.disk):
            return None
        name = type(module).__name__
        if layer is None or self.parts.mixers[layer.index] is not module or layer.attended:
            raise self.fail(
                f"attends more than once over what a layer caches, or to something else ({name})"
            )
        layer.attended = True
        latent = self.parts.latent
        if latent is not None:
            self._check_expansion(module, key, value)
        elif any(
            a.shape != b.shape or a.data_ptr() != b.data_ptr()
            for a, b in ((key, layer.keys), (value, layer.values))
        ):
            raise self.fail(f"changes keys or values after they were cached ({name})")
        heads = self.parts.shape.heads
        head_dim = self.parts.shape.head_dim if latent is None else latent.query_dim
        if tuple(query.shape) != (1, heads, TOKENS, head_dim):
            raise self.fail(
                f"has queries of shape {list(query.shape)} in {name}; its config says "
                f"{[1, heads, TOKENS, head_dim]}"
            )
        if self.parts.index_topk:
            check_choice(module, mask, options.get("indices"))
            refuse_terms(module, options)
            mask = None
        refuse_options(module, mask, 0.0, options)
        return torch.zeros_like(query[..., : value.shape[-1]]).transpose(1, 2)

    def _check_expansion(self, module: nn.Module, key, value) -> None:
        """Latents must be expanded by kv_b_proj alone, unrotated part first."""
        layer, latent = self._current, self.parts.latent
        expected = latent.expanded(module, layer.keys, layer.values)
        for ours, theirs in zip(expected, (key, value), strict=True):
            if ours.shape != theirs.shape or not _is_close(ours, theirs):
                raise self.fail(
                    "expands its latents otherwise than by kv_b_proj, or changes keys or values "
                    f"after that ({type(module).__name__})"
                )

    @property
    def stopped_in(self) -> str | None:
        """The attention that has updated the cache and not attended yet."""
        layer = self._current
        if layer is None or layer.attended:
            return None
        return type(self.parts.mixers[layer.index]).__name__

    def finish_layer(self) -> None:
        """The current layer must have attended by now."""
        layer = self._current
        if layer is None:
            return
        mixer = self.parts.mixers[layer.index]
        if not layer.attended:
            raise self.fail(
                "computes attention itself, not through the attention interface "
                f"({type(mixer).__name__})"
            )
        self._kinds_left.discard(self._kinds[layer.index])
        if not self._kinds_left:
            raise _Enough

    def finish(self) -> None:
        """The decoder has run to its end."""
        self.finish_layer()
        if self._kinds_left:
            names = ", ".join(sorted({kind.__name__ for kind, *_ in self._kinds_left}))
            raise self.fail(f"has attention layers that text alone does not reach ({names})")


class TrialLayer(DynamicLayer):
    """Keeps what it is given, and tells."""

    def __init__(self, trial: TrialCache, index: int):
        super().__init__()
        self._trial = weakref.ref(trial)
        self.index = index
        self.attended = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.keys, self.values = key_states, value_states
        self._trial().updates(self)
        return key_states, value_states

    def update_indexer(self, index_keys: torch.Tensor) -> torch.Tensor:
        return index_keys


def _is_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within what rounding explains, of weights of any precision."""
    apart = float((ours.float() - theirs.float()).norm())
    return apart <= EXPANSION_TOLERANCE * float(theirs.float().norm())


def _own_cache(decoder: nn.Module) -> str | None:
    """The class of its own that a decoder wants its cache to be of, by what its forward says."""
    (name,) = cache_argument(decoder, None)
    parameter = inspect.signature(decoder.forward).parameters.get(name)
    wanted = None if parameter is None else parameter.annotation
    kinds = get_args(wanted) or (wanted,)
    own = [k for k in kinds if inspect.isclass(k) and issubclass(k, Cache)]
    return next((k.__name__ for k in own if k.__module__ != Cache.__module__), None)


def _kind(mixer: nn.Module) -> tuple[Any, ...]:
    """Layers that differ in nothing that is seen from here are tried once."""
    shapes = tuple((name, tuple(p.shape)) for name, p in mixer.named_parameters())
    return type(mixer), getattr(mixer, "is_sliding", None), shapes
