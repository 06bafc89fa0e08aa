"""One layer of a `KVSwapCache` whose keys and values live on disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from kvswap_torch.chunks import pass_of
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf.layer_view import LayerView
from kvswap_torch.hf.session import ScoreTerms

if TYPE_CHECKING:
    from kvswap_torch.hf.driver import SessionDriver
    from kvswap_torch.hf.families import ModelParts


class DiskLayer(CacheLayerMixin):
    """What transformers sees of a layer on disk: lengths and mask sizes, never its tensors.

    A forward pass calls, in this order and on one thread: `arm` (the attention module's pre-hook),
    `update` (the attention module), `attend` (our attention function). `update` keeps the new keys
    and values until `attend` hands them to the session together with the query; so an `update`
    without our hook or our attention function is noticed instead of being lost.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, driver: SessionDriver, disk_index: int):
        # Not the base's constructor: it would set is_initialized, which is asked for here.
        self.disk_index = disk_index
        self.driver = driver
        self._armed = False
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sinks: tuple[Any, torch.Tensor] | None = None

    @property
    def keys(self) -> LayerView | None:
        """None while empty. Cut as ``layer.keys[:, :, :n]`` on all layers, it crops the cache."""
        return self._view("keys")

    @keys.setter
    def keys(self, cut: LayerView) -> None:
        self._cut("keys", cut)

    @property
    def values(self) -> LayerView | None:
        """As `keys`."""
        return self._view("values")

    @values.setter
    def values(self, cut: LayerView) -> None:
        self._cut("values", cut)

    def _view(self, side: str) -> LayerView | None:
        positions, parts = self.get_seq_length(), self.driver.parts
        if positions == 0:
            return None
        batch = self.driver.session.batch()
        keys, values = parts.cached_shapes(batch, positions)
        shape = keys if side == "keys" else values
        return LayerView(self.disk_index, side, shape, parts.dtype, parts.device)

    def _cut(self, side: str, cut: LayerView) -> None:
        mine = isinstance(cut, LayerView) and (cut.layer, cut.side) == (self.disk_index, side)
        if not mine:
            raise TypeError(
                f"KVSwapCache: {side} of a layer on disk can only be cut, as layer.{side} = "
                f"layer.{side}[:, :, :n], got a {type(cut).__name__}; crop() cuts all at once"
            )
        self.driver.crop_side(self.disk_index, side, cut.positions)

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: memory is allocated when the session's first tokens come."""

    @property
    def has_pending(self) -> bool:
        """Whether `update` took keys and values that wait for `attend`."""
        return self._pending is not None

    def arm(self) -> None:
        """The model's own attention module is about to run with this cache."""
        self._armed, self._pending = True, None

    def disarm(self) -> None:
        """It is not, after all: a pass has failed before."""
        self._armed, self._pending = False, None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the new tokens' K (after RoPE) and V, ``[batch, kv_heads, tokens, head_dim]``.

        Of latent attention these are the latent and the rotated key.

        Returns
        -------
        tuple
            The same tensors, not the whole cache: `attend` has what came before.
        """
        self.driver.check_open()
        if not self._armed:
            raise ValueError(from_elsewhere(self.driver.parts))
        self._armed, self._pending = False, (key_states, value_states)
        return key_states, value_states

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends over this layer's cache; ``[batch, tokens, heads, head_dim]``."""
        keys, values = self._take_pending(module)
        expands = self.driver.parts.latent is not None
        if not expands and (key.shape != keys.shape or value.shape != values.shape):
            raise UnsupportedModelError(
                f"KVSwapCache: {type(module).__name__} must attend to what it has cached, keys "
                f"{list(keys.shape)} and values {list(values.shape)}, got {list(key.shape)} and "
                f"{list(value.shape)}"
            )
        refuse_options(module, attention_mask, dropout, kwargs)
        if sliding_window is not None:
            _refuse_window(module, sliding_window, self.get_seq_length() + keys.shape[2])
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        terms = ScoreTerms(scale, softcap or 0.0, self._plain_sinks(s_aux))
        parts = self.driver.parts
        stored = parts.stored(keys, values)
        if _expands(self.driver, self.disk_index, keys.shape[2]):
            expansion = parts.latent.expansion(module)
            return self.driver.attend(self.disk_index, query, *stored, terms, expansion=expansion)
        asked = parts.asked(module, query)
        return parts.answered(module, self.driver.attend(self.disk_index, asked, *stored, terms))

    def _take_pending(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """What `update` took."""
        if self._pending is None:
            raise UnsupportedModelError(_why_no_update(module, self.driver.parts.outermost))
        pending, self._pending = self._pending, None
        return pending

    def _plain_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """In fp32, made anew where they changed: a device may read them after the step returned."""
        if sinks is None:
            return None
        state = sinks.data_ptr(), None if sinks.is_inference() else sinks._version
        if self._sinks is None or self._sinks[0] != state:
            self._sinks = state, sinks.detach().float().contiguous()
        return self._sinks[1]

    def get_seq_length(self) -> int:
        return self.driver.positions(self.disk_index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.driver.max_context

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "KVSwapCache: layers on disk change together; call this on the cache, not on a layer"
        )

    crop = reset = reorder_cache = _whole_cache_only
    batch_repeat_interleave = batch_select_indices = _whole_cache_only


def _expands(driver: SessionDriver, layer: int, tokens: int) -> bool:
    """Whether a pass of so many tokens attends latents by expanded heads.

    Plug-ins are asked by absorbed queries, which then attend, too.
    """
    latent, plug_ins = driver.parts.latent, driver.plug_ins
    if latent is None or plug_ins.group_scores is not None or plug_ins.token_scores is not None:
        return False
    is_step = pass_of(tokens, driver.config.selection.max_step_tokens) == "decode"
    return not is_step and latent.expands(driver.positions(layer), tokens)


def from_elsewhere(parts: ModelParts) -> str:
    """The sentence for an update that no forward pass of the cache's model makes."""
    return (
        f"KVSwapCache: must be used with the model it was opened for ({parts.name}), called as a "
        "module so that its hooks run; got an update from elsewhere. Open a cache for that model; "
        "if it is torch.compile()d, open the cache first"
    )


def disarm(layers: Iterable[Any]) -> None:
    """None of a cache's layers waits for what a failed pass did not come to."""
    for layer in layers:
        if isinstance(layer, DiskLayer):
            layer.disarm()


def _why_no_update(attention: nn.Module, model: nn.Module) -> str:
    compiled = next((part for part in model.modules() if _is_compiled(part)), None)
    if compiled is None:
        name = type(attention).__name__
        return f"KVSwapCache: {name} must update the cache before it attends, and did not"
    return (
        "KVSwapCache: forward must not be compiled while a cache is open, but torch.compile() was "
        f"applied to {type(compiled).__name__}; use the model as it was loaded, or "
        "torch.compile(model), whose generate() leaves forward as it is"
    )


def _is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or because its forward was replaced by a compiled one."""
    own = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(own, "_torchdynamo_orig_callable")


def _refuse_window(module: nn.Module, window: int, positions: int) -> None:
    if window < positions:
        raise UnsupportedModelError(
            f"KVSwapCache: {type(module).__name__} has a sliding window of {window} tokens, which "
            f"must be at least the context, got {positions}"
        )


def refuse_options(module, attention_mask, dropout: float, kwargs: dict[str, Any]) -> None:
    """What the kernel does not do must not be ignored."""
    name = type(module).__name__
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedModelError(
            f"KVSwapCache: {name} must attend causally with padding at most, got a mask of shape "
            f"{tuple(attention_mask.shape)}; pass a mask [batch, tokens] or none"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"KVSwapCache: {name} uses position_bias, which attention from disk has not"
        )
    if dropout:
        raise UnsupportedModelError(
            f"KVSwapCache: dropout must be 0, got {dropout}; call model.eval() first"
        )
