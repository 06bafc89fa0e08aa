"""What a model and its cache will take, from the model's config, before anything is loaded.

The model is built without weights (on the meta device), so that sizes are those of its own layers
in every family. A forward pass over it counts what is alive at once. What the cache takes is what
the engine's own count says (`memory_need`), with the settings that the cache would choose.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from kvswap_torch.config import SwapConfig
from kvswap_torch.few_bits import BITS, replace_unloaded
from kvswap_torch.hf.families import ModelParts, model_parts
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.hf.need import CacheNeed
from kvswap_torch.hf.opening import Wish
from kvswap_torch.hf.pieces import PIECE_TOKENS
from kvswap_torch.hf.plug_ins import PlugIns
from kvswap_torch.hf.settings import ready_for, settle

UNLOADED = "kvswap_unloaded"  # an attention that only has a shape
NOT_USES = ("total", "least", "record_bytes")  # of what memory_need() tells
CPU = torch.device("cpu")


@dataclass(frozen=True)
class CachePlan:
    """What a cache would be.

    Parameters
    ----------
    config
        The settings that it would choose.
    uses
        Bytes of memory by use.
    least
        The smallest budget that holds them.
    disk_bytes
        On disk once it is full.
    full_bytes
        What the same keys and values take in memory without this library.
    """

    config: SwapConfig
    uses: dict[str, int]
    least: int
    disk_bytes: int
    full_bytes: int

    @property
    def memory_bytes(self) -> int:
        return sum(self.uses.values())


def unloaded_model(config: Any, dtype: torch.dtype, weights: str | None = None) -> Any:
    """A model of this config without weights, its linear layers as they will be."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if weights in BITS:
        replace_unloaded(model, weights)
    return model.eval()


def computed_dtype(
    folder: str | Path, config: Any, dtype: str = "auto", weights: str | None = None
) -> torch.dtype:
    """What a model computes with, loaded with these options of a command."""
    if weights == "bf16":
        return torch.bfloat16
    return stored_dtype(folder, config) if dtype == "auto" else getattr(torch, dtype)


def stored_dtype(folder: str | Path, config: Any) -> torch.dtype:
    """What ``dtype="auto"`` comes to: the config's, else that of the first floating weight."""
    if str(folder).endswith(".gguf"):
        from kvswap_torch.hf import gguf_file

        return gguf_file.stored_dtype(folder)
    said = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(said, torch.dtype):
        return said
    known = (each.dtype for each in stored_weights(folder).values())
    return next((dtype for dtype in known if dtype is not None), torch.float32)


class StoredWeight(NamedTuple):
    """What a file says of a weight: bytes, and its type; None: none that is computed with."""

    nbytes: int
    dtype: torch.dtype | None


def stored_weights(folder: str | Path) -> dict[str, StoredWeight]:
    """Of a folder's safetensors files, by the names that they have there."""
    known = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    found = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = StoredWeight(end - begin, known.get(entry["dtype"]))
    return found


def stored_bytes(folder: str | Path) -> int | None:
    """Of all weights in a folder's safetensors files; None: there are none."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        told = json.loads(index.read_text(encoding="utf-8")).get("metadata") or {}
        if isinstance(told.get("total_size"), int):
            return told["total_size"]
    files = sorted(Path(folder).glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) if files else None


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return json.loads(opened.read(int.from_bytes(opened.read(8), "little")))


def weight_bytes(model: nn.Module) -> int:
    """Of all parameters and buffers; what is shared counts once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def plan_cache(
    model: Any,
    path: str | Path | None,
    config: SwapConfig | str | Path | None = None,
    preset: str | None = None,
    kv_memory_bytes: int | str | None = None,
    max_context: int | None = None,
    max_batch: int | None = None,
    keep: float | None = None,
    timeline_spans: int = 0,
) -> CachePlan:
    """What a `KVSwapCache` of a model without weights would take; the arguments are its own.

    Raises
    ------
    UnsupportedModelError, ConfigError, BudgetError
        As `KVSwapCache` would.
    """
    parts = model_parts(model, CPU)
    limits = (kv_memory_bytes, max_context, max_batch)
    wish = Wish(path, config, preset, *limits, timeline_spans, keep, PlugIns())
    given, budget, projections, _ = wish.granted(parts)
    need = CacheNeed(
        parts,
        path if path is None else str(path),
        budget,
        LookAhead(parts, budget.kv_memory_bytes, (given or SwapConfig()).ranks_by_sum),
        calibrated=projections is not None,
        timeline_spans=timeline_spans,
    )
    chosen = need.search(lambda: settle(given, parts.shape, budget, need))
    batch, context = ready_for(budget, None)
    uses = need(chosen, batch, context)
    on_disk = 0 if path is None else batch * _disk_bytes(parts, chosen, context, uses)
    return CachePlan(
        config=chosen,
        uses={name: count for name, count in uses.items() if name not in NOT_USES and count},
        least=uses["least"],
        disk_bytes=on_disk,
        full_bytes=parts.cached_bytes(batch, context),
    )


def _disk_bytes(parts: ModelParts, config: SwapConfig, context: int, uses: dict[str, int]) -> int:
    """Of one sequence: a record for each group of each layer, or of each of its KV heads."""
    records = parts.shape.layers * parts.shape.kv_heads // config.row_heads(parts.shape.kv_heads)
    return -(-context // config.selection.group_tokens) * records * uses["record_bytes"]


class Activations(NamedTuple):
    """What a forward pass holds at once, and whether that is an estimate."""

    bytes: int
    is_estimate: bool


def activations(model: Any, batch: int, tokens: int, is_wide: bool = False) -> Activations:
    """The most that a forward pass of so many tokens a sequence holds at once.

    Attention's own memory is the cache's, and counted there. A model whose pass depends on numbers
    (a choice of experts) cannot be run without them: then it is the widest layers' in and out.

    Parameters
    ----------
    is_wide
        The processor has no products of the model's dtype, so that a layer's weights, and what goes
        in and out of it, are made fp32 while a chunk passes (`half_linear`).
    """
    tokens = min(tokens, PIECE_TOKENS)
    extra = _widened_bytes(model, batch * tokens) if is_wide else 0
    counted = _pass_bytes(model, batch, tokens)
    if counted is not None:
        return Activations(extra + counted, is_estimate=False)
    return Activations(extra + _widest_bytes(model, batch * tokens), is_estimate=True)


def _widened_bytes(model: nn.Module, rows: int) -> int:
    sizes = [(m.in_features, m.out_features) for m in _linear_layers(model)]
    return max((4 * (i * o + rows * (i + o)) for i, o in sizes), default=0)


def _linear_layers(model: nn.Module) -> list[Any]:
    return [each for each in model.get_decoder().modules() if hasattr(each, "out_features")]


def _pass_bytes(model: Any, batch: int, tokens: int) -> int | None:
    """None: the pass cannot be run without numbers."""
    AttentionInterface.register(UNLOADED, _attention_of_shapes)
    AttentionMaskInterface.register(UNLOADED, lambda *given, **named: None)
    before = model.config._attn_implementation
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    try:
        model.set_attn_implementation(UNLOADED)
        with torch.no_grad(), LiveBytes() as live:
            positions = torch.arange(ids.shape[1], device="meta")[None]
            model.get_decoder()(
                input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids),
                use_cache=False,
            )  # fmt: skip
        return live.most
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    finally:
        model.set_attn_implementation(before)


def _widest_bytes(model: nn.Module, rows: int) -> int:
    widest = max((m.in_features + m.out_features for m in _linear_layers(model)), default=0)
    return 2 * rows * widest * next(model.parameters()).element_size()


def _attention_of_shapes(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made within, and the most that were there at once.

    What an operation is given, weights above all, was there before, and so were views of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._seen.update(storage._cdata for storage in _storages((args, kwargs)))
        out = func(*args, **kwargs)
        for storage in _storages(out):
            self._count(storage)
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storages(tensors: Any) -> list[Any]:
    return [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)]
