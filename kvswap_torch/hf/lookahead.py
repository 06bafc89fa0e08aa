"""Predicting the next layer's query from this layer's input (KVSwap, section 3.3).

A prediction that is verified is made later: from the residual after this layer's attention, which
lacks its MLP alone. Reads have the MLP's time, and more of them are the right ones.

Two ways, with the same answer:

*fast*, in C++, for the Llama and Qwen families with plain linear projections;
*generic*, for every model: the next attention module's own `forward` runs with a stub for a cache,
and our attention function returns the query it was called with.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Cache

from kvswap_torch.half_linear import HalfLinear
from kvswap_torch.hf import passes
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.offloaded import let_go
from kvswap_torch.hf.placement import local_part
from kvswap_torch.native import LIBRARY

FAST_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SUMMED_BYTES_MAX = 64 << 20  # for summed projections when there is no budget
SUMMED_BUDGET_SHARE = 8  # they may take one part in this many of a budget


class LookAhead:
    """Predicts queries for one model; made anew for each cache.

    What predictors would take is known at once; they are built with the first prediction, or by
    `build`.

    Parameters
    ----------
    parts
        The model.
    kv_memory_bytes
        The budget; summed projections are used only where they are a small part of it, and given
        up (`take_apart`) where the rest would not fit.
    by_sum
        Groups are ranked by a sum of logits, which can do with summed queries.
    """

    def __init__(self, parts: ModelParts, kv_memory_bytes: int | None = None, by_sum: bool = True):
        self._parts = parts
        fast = {i: m for i in parts.disk if _is_fast(m := parts.mixers[i])} if _load() else {}
        may_sum = bool(fast) and by_sum
        self.summed = may_sum and self._may_sum(fast, kv_memory_bytes)
        self._plan = tuple(fast)  # layers that are predicted the fast way
        self._fast: dict[int, Any] | None = None
        self._blocks = _blocks(parts)
        self.after_attention = _norms_after_attention(parts, self._blocks)
        rotary = getattr(parts.decoder, "rotary_emb", None)
        parameters = inspect.signature(rotary.forward).parameters if rotary is not None else {}
        self._rotary_by_kind = rotary if "layer_type" in parameters else None

    def _may_sum(self, fast: dict[int, Any], budget: int | None) -> bool:
        shape = self._parts.shape
        if shape.heads == shape.kv_heads or any(hasattr(m, "q_norm") for m in fast.values()):
            return False
        most = SUMMED_BYTES_MAX if budget is None else budget // SUMMED_BUDGET_SHARE
        return self._summed_bytes(fast) <= most

    def _summed_bytes(self, layers: Any) -> int:
        shape = self._parts.shape
        rows = shape.width * shape.element_bytes
        return sum(rows * self._parts.mixers[i].q_proj.in_features for i in layers)

    def take_apart(self) -> bool:
        """From now on without sums of projections, which take memory; False: there are none."""
        if not self.summed:
            return False
        self.summed, self._fast = False, None
        return True

    def build(self) -> dict[int, Any]:
        """Makes the predictors, by layer. Idempotent."""
        if self._fast is None:
            mixers = self._parts.mixers
            self._fast = {i: _predictor(mixers[i], self._parts, self.summed) for i in self._plan}
        return self._fast

    @property
    def nbytes(self) -> int:
        """Memory of the summed projections once they are built, bytes."""
        return self._summed_bytes(self._plan) if self.summed else 0

    @property
    def description(self) -> str:
        fast, layers = len(self._plan), len(self._parts.disk)
        if fast == 0:
            return "generic"
        kind = "fast, heads summed" if self.summed else "fast"
        return kind if fast == layers else f"{kind} ({fast} of {layers} layers)"

    def predict(
        self, layer: int, source: int, hidden: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """The query of `layer`, as far as the input of `source`, the layer before, tells.

        Parameters
        ----------
        layer, source
            Numbers of layers in the model.
        hidden
            ``[batch, tokens, hidden]``: what `source`'s attention is called with, normalised.
        kwargs
            The other arguments of that call.

        Returns
        -------
        Tensor or None
            ``[batch, heads or kv_heads, tokens, head_dim]`` after RoPE; None when `source` does not
            know positions (it is no attention), so that nothing can be said.
        """
        attention = self._parts.mixers[layer]
        embeddings = self._position_embeddings(layer, source, hidden, kwargs)
        # A replaced forward must run to its end, unless it is accelerate's: see `let_go`.
        is_replaced = "forward" in vars(attention) and not hasattr(attention, "_hf_hook")
        if embeddings is None or is_replaced:
            return None
        with torch.no_grad():
            predictor = self.build().get(layer)
            if predictor is not None:
                cos, sin = embeddings
                return predictor.predict(hidden, cos, sin)
            query = captured_query(attention, hidden, embeddings, kwargs)
            return self._parts.asked(attention, query)

    def predict_after_attention(
        self, layer: int, residual: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """The same from what `after_attention[layer - 1]` is called with, before it is normalised.

        kwargs: what the attention of ``layer - 1`` was called with.
        """
        with torch.no_grad():
            hidden = self._blocks[layer].input_layernorm.forward(residual)
        return self.predict(layer, layer - 1, hidden, kwargs)

    def _position_embeddings(self, layer, source, hidden, kwargs) -> Any:
        kinds = self._parts.kinds
        if self._rotary_by_kind is not None and kinds[layer] != kinds[source]:
            positions = kwargs.get("position_ids")
            if positions is None or kinds[layer] not in self._rotary_by_kind.rope_type:
                return None  # not known, or not turned, and perhaps scaled by position
            return self._rotary_by_kind(hidden, positions, kinds[layer])
        return kwargs.get("position_embeddings")


def _blocks(parts: ModelParts) -> Any:
    """The decoder's layers; none where it keeps them otherwise."""
    blocks = getattr(parts.decoder, "layers", ())
    return blocks if len(blocks) == len(parts.mixers) else ()


def _norms_after_attention(parts: ModelParts, blocks: Any) -> dict[int, nn.Module]:
    """Of layers before one on disk, the norm that the residual after their attention goes to.

    Layers that normalise what attention returns, or run beside their MLP, have none.
    """
    norms = {}
    for index in parts.disk:
        if not 0 < index < len(blocks) or not hasattr(blocks[index], "input_layernorm"):
            continue
        before = blocks[index - 1]
        names = [name for name in _NORMS if hasattr(before, name)]
        if names and hasattr(before, "input_layernorm") and parts.mixers[index - 1] is not None:
            norms[index - 1] = getattr(before, names[0])
    return norms


# Where a layer has the first, the second is of what attention returns.
_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm")


def captured_query(
    attention: nn.Module, hidden: torch.Tensor, embeddings: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    """The query `attention` makes of `hidden`; its own code, whatever it is wrapped in.

    Returns
    -------
    Tensor
        ``[batch, heads, tokens, head_dim]``.
    """
    # Families name the cache differently, and it must not be written to.
    call = {
        name: _NoCache(value) if isinstance(value, Cache) else value
        for name, value in kwargs.items()
    } | {"hidden_states": hidden, "position_embeddings": embeddings, "attention_mask": None}

    def take(module: nn.Module, query: torch.Tensor, *others: Any) -> None:
        if module is attention:
            raise _Captured(query)

    passes.here.observer = take
    try:
        attention.forward(**call)
    except _Captured as captured:
        return captured.query
    finally:
        passes.here.observer = None
        let_go(attention)
    raise RuntimeError(f"look-ahead: {type(attention).__name__} did not attend")


def attention_scale(attention: nn.Module, head_dim: int) -> float:
    """What an attention multiplies its products by, as transformers' attention functions do."""
    scaling = getattr(attention, "scaling", None)
    return head_dim**-0.5 if scaling is None else float(scaling)


class _Captured(Exception):
    """Ends an attention's forward where its query is known: the rest of it is of no use."""

    def __init__(self, query: torch.Tensor):
        super().__init__()
        self.query = query


class _NoCache:
    """Stands for a cache, and keeps nothing."""

    def __init__(self, cache: Cache):
        self._cache = cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._cache.get_seq_length(layer_idx)

    def update(self, keys, values, *args, **kwargs):
        return keys, values


def _load() -> bool:
    if not LIBRARY.is_file():
        return False
    torch.classes.load_library(str(LIBRARY))
    try:
        return torch.classes.kvswap_torch.QueryPredictor is not None
    except RuntimeError:
        return False


def _is_fast(attention: nn.Module) -> bool:
    family = type(attention).__module__.split(".")
    projection, norm = getattr(attention, "q_proj", None), getattr(attention, "q_norm", None)
    known = family[:2] == ["transformers", "models"] and family[2] in FAST_FAMILIES
    return (
        known
        and type(projection) in (nn.Linear, HalfLinear)
        and _is_plain(projection.weight)
        and (projection.bias is None or _is_plain(projection.bias))
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
        # accelerate puts its own there; so does transformers, to split heads over processes
        and ("forward" not in vars(projection) or isinstance(projection.weight, DTensor))
        and (norm is None or hasattr(norm, "variance_epsilon"))
    )


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether numbers may be taken as they lie: a quantised weight is a tensor of its own kind."""
    return type(weight) in (nn.Parameter, DTensor) and weight.is_floating_point()


def _predictor(attention: nn.Module, parts: ModelParts, summed: bool) -> Any:
    projection, norm = attention.q_proj, getattr(attention, "q_norm", None)
    return torch.classes.kvswap_torch.QueryPredictor(
        local_part(projection.weight),
        None if projection.bias is None else local_part(projection.bias),
        None if norm is None else local_part(norm.weight),
        0.0 if norm is None else norm.variance_epsilon,
        parts.shape.heads,
        parts.shape.kv_heads,
        summed,
    )
