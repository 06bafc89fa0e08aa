"""What a model is made of, and whether its cache can live on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from kvswap_torch.config import ModelIdentity
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf.latent import Latent, latent_of
from kvswap_torch.hf.offloaded import devices_of
from kvswap_torch.hf.placement import Placement, placement_of
from kvswap_torch.preset.definition import Shape
from kvswap_torch.sizing import ModelShape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIM_MAX = 256
LATENT_DIM_MAX = 1024
# "indexed_attention", as releases of transformers before it call it.
OLD_INDEXED = ("deepseek_sparse_attention", "qwen_sparse_attention")
NO_ATTENTION = "has no attention layer, only states of a fixed size: its cache is small already"
# What families call the list of their layers, below the decoder: one with attention is meant.
LAYER_LISTS = ("layers", "h", "blocks", "encoder.layer", "encoder.layers")
ATTENTIONS = ("self_attn", "attention", "attn")
# Kinds of layers with a past that grows, and why it stays in memory.
OTHER_KINDS = {
    "hybrid": "has attention only in hybrid blocks, beside a recurrent state of the same layer",
    "indexed_attention": "chooses by an index of its own, before it caches keys, and attends by a "
    "mask (indexed_attention)",
    "compressed_sparse_attention": "compresses its cache itself (compressed_sparse_attention)",
    "heavily_compressed_attention": "compresses its cache itself (heavily_compressed_attention)",
}


@dataclass(frozen=True)
class ModelParts:
    """One decoder, seen from its cache.

    Parameters
    ----------
    name
        The model's class, for messages.
    outermost, decoder, layers
        The module that users call; `decoder` is the one that owns `layers`.
    mixers
        Per layer its attention (or other token-mixing) module; None where it has none.
    kinds, layer_kwargs
        Per layer transformers' layer type and what its own cache layer is made with.
    disk
        Numbers of the layers whose KV goes to disk, rising.
    windows
        Sliding windows so wide that their layers are full attention in effect.
    shape, identity
        Of what this process has of the model, and of the whole model.
    placement, disk_everywhere
        Which part this process has where several run one model, and `disk` of all of them.
    value_dim
        Of a KV head's values. Records have them so (`shape.value_dim`), but on a device, and in
        what earlier versions saved: there as wide as keys, with zeros behind.
    index_topk, index_width
        Of a model that chooses by an index of its own: tokens that a query attends, and numbers of
        the index's keys in all layers on disk. 0: it attends all.
    latent
        Of a model that caches latents: how wide they are. `shape` is then that of one KV head whose
        keys are the latent and the rotated key, and whose values are its keys.
    """

    name: str
    outermost: PreTrainedModel
    decoder: PreTrainedModel
    layers: nn.ModuleList
    mixers: tuple[nn.Module | None, ...]
    kinds: tuple[str, ...]
    layer_kwargs: tuple[dict[str, Any], ...]
    disk: tuple[int, ...]
    windows: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    shape: ModelShape
    identity: ModelIdentity = field(repr=False)
    placement: Placement = field(default_factory=Placement, repr=False)
    disk_everywhere: tuple[int, ...] = ()
    value_dim: int = 0
    index_topk: int = 0
    index_width: int = 0
    latent: Latent | None = None

    @cached_property
    def disk_index(self) -> dict[int, int]:
        """Number of a layer in the model -> its number among those on disk."""
        return {index: number for number, index in enumerate(self.disk)}

    @property
    def config(self) -> Any:
        """The decoder's own config: what attention and mask functions are looked up by."""
        return self.decoder.config

    def preset_shape(self, alignment_bytes: int = 4096) -> Shape:
        """What a preset's settings follow from, on a disk that reads so many bytes at once."""
        shape = Shape.of(self.identity, alignment_bytes)
        return replace(shape, sides=self.shape.sides, value_dim=self.shape.value_dim)

    def recorded(self, value_dim: int) -> ModelParts:
        """Of a saved cache whose records have V so wide; 0: as wide as K, with zeros behind."""
        return replace(self, shape=replace(self.shape, value_dim=value_dim))

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as a session takes them, of what the model caches."""
        if self.latent is None:
            missing = self.shape.value_width - self.value_dim
            return keys, F.pad(values, (0, missing)) if missing else values
        joined = self.latent.join(keys, values)
        return joined, joined

    def cached(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model caches, of a session's K and V."""
        if self.latent is not None:
            return self.latent.split(keys)
        return keys, values[..., : self.value_dim]

    def asked(self, attention: nn.Module, query: torch.Tensor) -> torch.Tensor:
        """The query over a session's K, of the model's own."""
        return query if self.latent is None else self.latent.absorb(attention, query)

    def answered(self, attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
        """What the model's attention gives, of a session's output."""
        if self.latent is not None:
            return self.latent.expand(attention, output)
        return output[..., : self.value_dim]

    def index_bytes(self, batch: int, tokens: int) -> int:
        """Of the index's keys, which are in memory."""
        return self.index_width * batch * tokens * self.dtype.itemsize

    def cached_shapes(self, batch: int, tokens: int) -> tuple[torch.Size, torch.Size]:
        """Of what the model caches as keys and as values."""
        shape, latent = self.shape, self.latent
        widths = (shape.head_dim, self.value_dim)
        if latent is not None:
            widths = (latent.rank, latent.rotary)
        keys, values = (torch.Size((batch, shape.kv_heads, tokens, width)) for width in widths)
        return keys, values

    def cached_bytes(self, batch: int, tokens: int) -> int:
        """Of what the model caches in the layers on disk: records may be wider."""
        numbers = sum(shape.numel() for shape in self.cached_shapes(batch, tokens))
        return numbers * self.shape.layers * self.shape.element_bytes


# Of PEFT: adapters that are keys and values of tokens which nobody typed.
_OWN_KEYS = {"PREFIX_TUNING", "CARTRIDGE"}


def _check_adapter(wrapped: Any) -> None:
    """Refuses an adapter that begins every text with a cache of its own."""
    kind = getattr(getattr(wrapped, "active_peft_config", None), "peft_type", None)
    kind = getattr(kind, "value", kind)
    if kind in _OWN_KEYS:
        raise unsupported(
            type(wrapped.get_base_model()).__name__,
            f"has an adapter of PEFT's kind {kind}, which begins each text with a cache of its "
            "own, in the place of the one that is given; LoRA and prompt tuning are supported",
        )


def model_parts(model: Any, place: torch.device | None = None) -> ModelParts:
    """Takes a model apart, or says by name why its cache cannot live on disk.

    Parameters
    ----------
    place
        Where the model will be: of one without weights, on the meta device.

    Raises
    ------
    ValueError
        When it is not a transformers model.
    UnsupportedModelError
        Naming what is in the way.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile()'s wrapper
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        _check_adapter(model)
        model = model.get_base_model()  # PEFT's wrapper
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model: must be a transformers PreTrainedModel, got {type(model).__name__}"
        )
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise unsupported(name, "is an encoder-decoder model; decoder-only models are supported")
    decoder, layers = _decoder(model)
    config = decoder.config
    kinds, layer_kwargs = _layer_types_and_kwargs(config)
    mixers = tuple(mixer for layer in layers for mixer in _mixers(layer))
    _check_kinds(name, kinds, mixers)
    windows = _full_windows(config, kinds, layer_kwargs)
    disk_everywhere = _disk_layers(name, kinds, layer_kwargs, windows, mixers)
    layer_config = config.per_layer_config[disk_everywhere[0]]
    heads = getattr(layer_config, "num_attention_heads", None)
    if heads is None:
        raise unsupported(name, NO_ATTENTION)
    latent = _latent(mixers, disk_everywhere)
    kv_heads = 1 if latent else _kv_heads(layer_config, mixers[disk_everywhere[0]]) or heads
    placement = placement_of(model, heads, kv_heads, disk_everywhere, latent=latent is not None)
    disk = tuple(i for i in disk_everywhere if placement.has_layer(i))
    attentions = [mixers[i] for i in disk]
    _check_attention(name, decoder, attentions)
    dtype, shape = _tensors(name, decoder, attentions, layer_config, placement, latent)
    device = place or _device(name, decoder, attentions)
    shape = _narrowed(shape, attentions[0], device)
    identity = ModelIdentity(
        model_type=config.model_type,
        layers=len(disk_everywhere),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        config_hash=config_hash(config),
    )
    return ModelParts(
        name=name,
        outermost=model,
        decoder=decoder,
        layers=layers,
        mixers=mixers,
        kinds=tuple(kinds),
        layer_kwargs=tuple(layer_kwargs),
        disk=disk,
        windows=windows,
        device=device,
        dtype=dtype,
        shape=shape,
        identity=identity,
        placement=placement,
        disk_everywhere=disk_everywhere,
        value_dim=getattr(attentions[0], "v_head_dim", shape.head_dim),
        latent=latent,
        **_index_of(config, kinds, disk, mixers),
    )


def _decoder(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The module that owns the layers, and these."""
    name, found = type(model).__name__, model.get_decoder()
    decoders = [found, getattr(found, "model", None), model.base_model]
    for decoder in decoders:
        layers = _layers(decoder) if isinstance(decoder, PreTrainedModel) else None
        if layers is not None:
            return decoder, layers
    lists = {each: part for each, part in found.named_modules() if isinstance(part, nn.ModuleList)}
    known = ", ".join(LAYER_LISTS)
    if not lists:
        raise unsupported(name, f"keeps no list of layers; they are looked for in {known}")
    if sum(map(len, lists.values())) < (getattr(found.config, "num_hidden_layers", None) or 0):
        raise unsupported(
            name,
            "has fewer layers in lists than its config counts: it runs them several times in a "
            "pass, or keeps them elsewhere",
        )
    longest = max(lists, key=lambda each: len(lists[each]))
    raise unsupported(name, f"keeps its layers in {longest}; they are looked for in {known}")


def _layers(decoder: PreTrainedModel) -> nn.ModuleList | None:
    for name in LAYER_LISTS:
        parent, _, last = name.rpartition(".")
        owner = getattr(decoder, parent, None) if parent else decoder
        layers = getattr(owner, last, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    return None


def _layer_types_and_kwargs(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """As transformers has it since 5.19; before, one dict held what any kind of layer needs.

    And before they all were "indexed_attention", each kind of index had a name of its own.
    """
    kinds, layer_kwargs = get_layer_types_and_kwargs(config)
    kinds = ["indexed_attention" if kind in OLD_INDEXED else kind for kind in kinds]
    if isinstance(layer_kwargs, dict):
        layer_kwargs = [dict(layer_kwargs) for _ in kinds]
    return kinds, layer_kwargs


def config_hash(config: Any) -> str:
    """Digest of the numbers that shape a model's keys and queries, the same in every release."""
    names = (
        "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim intermediate_size vocab_size"
    )
    facts = {name: _fact(config, name) for name in names.split()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _fact(config: Any, name: str) -> Any:
    """None also where it differs by layer, which transformers does not answer for."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _mixers(layer: nn.Module) -> list[nn.Module | None]:
    """The children that read and write the cache: they know their layers' numbers.

    One, or none; LongCat Flash has two attentions in a layer, each with a place in the cache.
    """
    children = dict(layer.named_children())
    for name in ATTENTIONS:
        if name in children:
            found = children[name]
            return list(found) if isinstance(found, nn.ModuleList) else [_innermost(found)]
    numbered = (c for c in children.values() if _is_numbered(c))
    found = next(numbered, None)
    return [None if found is None else _innermost(found)]


def _innermost(mixer: nn.Module) -> nn.Module:
    """Of an attention in a wrapper with a norm or a projection (BERT's, Dbrx's), itself."""
    inner = (getattr(mixer, name, None) for name in (*ATTENTIONS, "self"))
    found = next((each for each in inner if isinstance(each, nn.Module)), None)
    return mixer if found is None or not _is_numbered(found) else _innermost(found)


def _is_numbered(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int)


def _check_kinds(name: str, kinds: list[str], mixers: tuple[nn.Module | None, ...]) -> None:
    unknown = sorted(set(kinds) - set(DYNAMIC_LAYER_TYPE_MAPPING) - {"indexed_attention"})
    if unknown:
        raise unsupported(name, f"has layers of a kind that is not known: {', '.join(unknown)}")
    if len(kinds) != len(mixers):
        raise unsupported(name, f"caches {len(kinds)} layers, but has {len(mixers)} layers")


def _full_windows(config: Any, kinds: list[str], layer_kwargs: list[dict]) -> frozenset[int]:
    """Windows at least as long as the longest sequence, as in Phi-3's 128K models."""
    longest = getattr(config, "max_position_embeddings", None)
    windows = {
        kwargs["sliding_window"]
        for kind, kwargs in zip(kinds, layer_kwargs, strict=True)
        if kind == "sliding_attention"
    }
    return frozenset(w for w in windows if isinstance(longest, int) and w >= longest)


def _index_of(
    config: Any, kinds: list[str], disk: tuple[int, ...], mixers: tuple[nn.Module | None, ...]
) -> dict[str, int]:
    if kinds[disk[0]] != "indexed_attention":
        return {}
    own = sum(getattr(mixers[i], "indexer", None) is not None for i in disk)
    return {"index_topk": config.index_topk, "index_width": own * config.index_head_dim}


def _latent(mixers: tuple[nn.Module | None, ...], layers: Iterable[int]) -> Latent | None:
    """Of the first of `layers` that this process has: a stage has not those of others."""
    found = (latent_of(mixers[i]) for i in layers)
    return next(filter(None, found), None)


def _kv_heads(layer_config: Any, attention: Any) -> int | None:
    """None: one of each query head's own."""
    found = getattr(layer_config, "num_key_value_heads", None)
    for name in ("num_key_value_heads", "kv_heads"):
        found = found or getattr(attention, name, None)
    return found


def _disk_layers(
    name: str,
    kinds: list[str],
    layer_kwargs: list[dict],
    windows: frozenset[int],
    mixers: tuple[nn.Module | None, ...],
) -> tuple[int, ...]:
    """Of all processes: those of full attention, and those whose index says what they attend."""
    has_latents = _latent(mixers, range(len(mixers))) is not None
    found = tuple(
        i
        for i, kind in enumerate(kinds)
        if kind == "full_attention"
        or (kind == "sliding_attention" and layer_kwargs[i]["sliding_window"] in windows)
        or (kind == "indexed_attention" and has_latents)
    )
    if len({kinds[i] == "indexed_attention" for i in found}) > 1:
        raise unsupported(name, "has layers with an index of what they attend beside such without")
    if not found:
        raise unsupported(name, _why_none(kinds, layer_kwargs))
    return found


def _check_attention(name: str, decoder: PreTrainedModel, attentions: list) -> None:
    config = decoder.config
    if any(mode == "reuse" for mode in getattr(config, "kv_sharing_modes", None) or ()):
        raise unsupported(name, "shares one layer's keys and values with other layers")
    if None in attentions or not getattr(decoder, "_can_set_attn_implementation", lambda: True)():
        raise unsupported(name, "computes attention itself, not through the attention interface")
    if isinstance(getattr(decoder, "embed_tokens", None), nn.ModuleList):
        raise unsupported(
            name,
            "takes several codes of sound for each position, in rows of their own, not a row of "
            "token ids for each sequence",
        )
    if any(hasattr(a, "prepare_dynamic_mask") for a in attentions):
        raise unsupported(
            name,
            "masks its attention by a score of every cached value, so that each step needs all of "
            "them",
        )
    if len({latent_of(a) for a in attentions}) > 1:
        raise unsupported(name, "has layers whose latents differ in width (kv_lora_rank)")
    if getattr(config, "use_bidirectional_attention", False) or not all(
        getattr(a, "is_causal", True) for a in attentions
    ):
        raise unsupported(name, "attends to later tokens (bidirectional attention)")


def _why_none(kinds: list[str], layer_kwargs: list[dict]) -> str:
    """Why no layer is full attention."""
    for kind, why in OTHER_KINDS.items():
        if kind in kinds:
            return why
    windows = {kwargs["sliding_window"] for kwargs in layer_kwargs if "sliding_window" in kwargs}
    if windows:
        tokens = ", ".join(map(str, sorted(windows)))
        return (
            f"has no full-attention layer (windows of {tokens} tokens): its cache is small already"
        )
    return NO_ATTENTION


def _tensors(
    name: str,
    decoder: PreTrainedModel,
    attentions: list[nn.Module],
    layer_config: Any,
    placement: Placement,
    latent: Latent | None,
) -> tuple[torch.dtype, ModelShape]:
    heads, kv_heads = placement.local_heads()
    if latent is not None:
        dtype = _latent_dtype(name, decoder, attentions, latent)
        return dtype, ModelShape(
            len(attentions), heads, 1, latent.head_dim, dtype.itemsize, sides=1
        )
    whole = placement.heads
    own = (getattr(attentions[0], each, None) for each in ("head_dim", "attention_head_size"))
    head_dim = next(filter(None, own), layer_config.hidden_size // whole)
    value_dim = getattr(attentions[0], "v_head_dim", head_dim)
    if head_dim % 8 or head_dim > HEAD_DIM_MAX or value_dim > head_dim:
        raise unsupported(
            name,
            f"has heads of {head_dim} (keys) and {value_dim} (values) elements; keys must be a "
            f"multiple of 8, at most {HEAD_DIM_MAX}, and values no wider",
        )
    dtype = _supported_dtype(name, decoder, attentions)
    return dtype, ModelShape(len(attentions), heads, kv_heads, head_dim, dtype.itemsize)


def _narrowed(shape: ModelShape, attention: nn.Module, device: torch.device) -> ModelShape:
    """With V as narrow as the model's, where records may be: a device's kernels take one width."""
    value_dim = getattr(attention, "v_head_dim", shape.head_dim)
    if device.type != "cpu" or shape.sides == 1 or value_dim == shape.head_dim:
        return shape
    return replace(shape, value_dim=value_dim)


def _latent_dtype(
    name: str, decoder: PreTrainedModel, attentions: list[nn.Module], latent: Latent
) -> torch.dtype:
    """Of what a model with latent attention caches, if that can be done here."""
    if latent.head_dim % 8 or latent.head_dim > LATENT_DIM_MAX:
        raise unsupported(
            name,
            f"caches latents of {latent.rank} numbers and rotated keys of {latent.rotary}; "
            f"together they must be a multiple of 8, at most {LATENT_DIM_MAX}",
        )
    if _device(name, decoder, attentions).type != "cpu":
        raise unsupported(
            name,
            "has multi-head latent attention, which is done on the CPU alone; move the model with "
            "model.to('cpu')",
        )
    return _supported_dtype(name, decoder, attentions)


def _supported_dtype(
    name: str, decoder: PreTrainedModel, attentions: list[nn.Module]
) -> torch.dtype:
    dtype = _dtype(decoder, attentions)
    if dtype not in DTYPES:
        raise unsupported(name, f"is of type {dtype}; float32, bfloat16 and float16 are supported")
    return dtype


def _dtype(decoder: PreTrainedModel, attentions: list[nn.Module]) -> torch.dtype:
    """Of keys and values: that of attention's weights.

    Quantised ones are integers, numbers of one byte, or no parameters at all, and adapters beside
    them may have a type of their own. Keys then have the type of what comes into attention, which
    the decoder's other weights have, its embedding first.
    """
    own = [p for a in attentions for p in a.parameters()]
    if not own or not all(_is_plain(p) for p in own):
        own = [p for p in decoder.parameters() if _is_plain(p)]
    return next((p.dtype for p in own), torch.float32)


def _is_plain(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize > 1


def _device(name: str, decoder: PreTrainedModel, attentions: list[nn.Module]) -> torch.device:
    devices: set[torch.device] = set().union(*map(devices_of, attentions))
    devices = devices or devices_of(decoder)
    if len(devices) == 1 and (only := next(iter(devices))).type in ("cpu", "cuda"):
        return only
    if devices == {torch.device("meta")}:
        raise unsupported(
            name,
            "has no weights, since all of its attention is on the meta device; load it with "
            "device_map=None, or its layers from disk with load_on_disk() of "
            "kvswap_torch.integrations",
        )
    raise unsupported(
        name,
        f"is on {', '.join(sorted(map(str, devices)))}; all of it must be on the CPU or on one "
        "CUDA device: move the model with model.to('cpu') or model.to('cuda:0')",
    )


def input_device(model: Any) -> torch.device:
    """Where a model takes its tokens.

    ``model.device`` is that of its first parameter, which is "meta" if the embedding is on disk
    between calls (`kvswap_torch.hf.offloaded`).
    """
    return model.device if model.device.type != "meta" else model_parts(model).device


def unsupported(name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"KVSwapCache: {name} {why}")


def changes_with_length(parts: ModelParts) -> bool:
    """Whether a text's length decides how its keys are rotated: no part of it is another's then."""
    kinds = getattr(getattr(parts.decoder, "rotary_emb", None), "rope_type", "default")
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind in ("longrope", "dynamic") for kind in kinds)


def refuse_rope_crossing(parts: ModelParts, positions: int, tokens: int, longest: int) -> None:
    """Long RoPE has other factors past the original length, which changes earlier keys.

    Parameters
    ----------
    positions, tokens
        Before the pass, and of it.
    longest
        Positions that there were when any key of the cache was made.
    """
    rope = getattr(parts.decoder, "rotary_emb", None)
    settings = getattr(parts.config, "rope_parameters", None) or {}
    original = getattr(parts.config, "original_max_position_embeddings", None)
    original = original or settings.get("original_max_position_embeddings")
    if getattr(rope, "rope_type", None) != "longrope" or original is None or positions == 0:
        return
    if positions <= original < positions + tokens:
        how = "grow across that length"
    elif positions + tokens <= original < longest:
        how = f"go on below it after a text of {longest}"
    else:
        return
    raise UnsupportedModelError(
        f"KVSwapCache: {parts.name} changes its rotary factors past {original} tokens, so a "
        f"cache must not {how}, got {positions} + {tokens}; reset() and "
        "prefill the whole text at once (a prompt that is longer from the start is fine)"
    )
