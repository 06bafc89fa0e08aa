"""Weights that take at most so much memory: the other layers are read from disk in each pass.

Resident weights are copied out of the checkpoint's mapped file. The kernel would drop mapped pages,
and read them again, if memory is short. Layers on disk are read ahead into two buffers of the
largest layer's size (`kvswap_torch.hf.weights_reader`). An embedding of its own is mapped: a pass
reads only the rows of its tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.half_linear import HALF, HalfLinear, replace_linear
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.offloaded import offloading_hooks
from kvswap_torch.hf.unloaded import StoredWeight, stored_dtype, stored_weights, unloaded_model
from kvswap_torch.hf.weights_reader import (
    BUFFERS,
    STACK_DIMENSIONS,
    block_bytes_max,
    read_ahead,
)
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.process_memory import give_back_memory

CPU = torch.device("cpu")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class WeightsPlan:
    """Where each part of a model is.

    Parameters
    ----------
    places
        Modules by name: ``cpu`` or ``disk``; as transformers' ``device_map``.
    resident_bytes, buffer_bytes
        Weights that stay in memory, and the buffers for those on disk.
    read_bytes
        What each forward pass reads.
    is_rewritten
        Whether loading writes weights to disk again: the checkpoint has others than the model.
    """

    places: dict[str, str]
    resident_bytes: int
    buffer_bytes: int
    read_bytes: int
    is_rewritten: bool = False

    @property
    def memory_bytes(self) -> int:
        return self.resident_bytes + self.buffer_bytes

    def __str__(self) -> str:
        return (
            f"weights: {format_bytes(self.memory_bytes)} in memory; each token, and each chunk of "
            f"a prompt, reads {format_bytes(self.read_bytes)} of weights from disk"
        )


@dataclass(frozen=True)
class Stored:
    """What the checkpoint's files have.

    Parameters
    ----------
    dtype
        Type of weights that are not in `weights`.
    weights
        Each by its name there.
    is_safetensors
        Whether they are in safetensors files, which are read where they are.
    """

    dtype: torch.dtype
    weights: dict[str, StoredWeight] = field(default_factory=dict, repr=False)
    is_safetensors: bool = True

    def nbytes(self, name: str, parameter: torch.Tensor) -> int:
        if name in self.weights:
            return self.weights[name].nbytes
        return parameter.numel() * self.dtype.itemsize

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self.weights[name].dtype if name in self.weights else self.dtype


@dataclass(frozen=True)
class _Part:
    """A module that may be on disk: bytes in memory, in its files, and in a reader's buffer."""

    names: tuple[str, ...]
    nbytes: int
    file_bytes: int
    buffer_bytes: int


def stored_as(name: str | Path, config: Any) -> Stored:
    """What a model's folder has; of a name in the hub what the config says."""
    if not Path(name).is_dir():
        return Stored(stored_dtype(name, config))
    found = stored_weights(name)
    return Stored(stored_dtype(name, config), found, bool(found))


def plan_weights(
    model: Any, stored: Stored, limit: int, what: str = "--weights-memory"
) -> WeightsPlan | None:
    """How a model of that shape keeps its weights in `limit` bytes.

    Parameters
    ----------
    model
        Without weights, as `unloaded_model` makes it.
    what
        What says the limit, for the error.

    Returns
    -------
    WeightsPlan or None
        None: all weights fit.

    Raises
    ------
    ConfigError
        The limit is too small; names the least.
    """
    total = _bytes_of(model.parameters())
    if total <= limit:
        return None
    parts = _Parts.of(model, stored)
    choices = [_Choice(total, parts, is_head_resident=False)]
    if parts.head is not None:
        choices.append(_Choice(total, parts, is_head_resident=True))
    possible = [choice for choice in choices if choice.least <= limit]
    if not possible:
        least = min(choice.least for choice in choices)
        largest = format_bytes(max(part.nbytes for part in parts.layers))
        raise ConfigError(
            f"{what}: must be at least {-(-least >> 10)} KiB, room for two of the largest layer "
            f"({largest}) and for weights that no layer has, got {limit} bytes"
        )
    best = min(possible, key=lambda choice: choice.read_bytes(limit))
    on_disk = best.on_disk(limit)
    return WeightsPlan(
        places=_places(model, {name for part in on_disk for name in part.names}),
        resident_bytes=total - sum(part.nbytes for part in on_disk),
        buffer_bytes=best.buffers,
        read_bytes=best.read_bytes(limit),
        is_rewritten=not stored.is_safetensors or _is_converted(model),
    )


@dataclass(frozen=True)
class _Parts:
    """Decoder layers; the output layer; an embedding of its own that may stay in its file."""

    layers: list[_Part]
    head: _Part | None
    embedding: _Part | None

    @classmethod
    def of(cls, model: Any, stored: Stored) -> _Parts:
        names = {id(module): name for name, module in model.named_modules()}
        layers = model_parts(model, CPU).layers
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        is_shared = head is not None and getattr(embedding, "weight", None) is head.weight
        of_head = [] if head is None else [head]
        if is_shared:
            of_head.append(embedding)
        own = None
        # Of another type, all of it would be converted in each pass.
        name = names[id(embedding)]
        dtype = stored.dtype_of(f"{name}.weight")
        if not is_shared and stored.is_safetensors and embedding.weight.dtype == dtype:
            own = _part([(name, embedding)], stored)
        heads = [(names[id(module)], module) for module in of_head]
        return cls(
            [_part([(names[id(layer)], layer)], stored) for layer in layers],
            _part(heads, stored) if heads else None,
            own,
        )

    @property
    def all(self) -> list[_Part]:
        return [*self.layers, *(each for each in (self.head, self.embedding) if each is not None)]


def _part(modules: list[tuple[str, nn.Module]], stored: Stored) -> _Part:
    found: dict[int, tuple[int, torch.Tensor]] = {}  # the largest that has a parameter's name
    for place, module in modules:
        for name, parameter in module.named_parameters():
            size = stored.nbytes(f"{place}.{name}", parameter)
            size = max(size, found.get(id(parameter), (0, parameter))[0])
            found[id(parameter)] = size, parameter
    ahead = [size for size, p in found.values() if p.dim() < STACK_DIMENSIONS]
    return _Part(
        names=tuple(name for name, _ in modules),
        nbytes=sum(p.nbytes for _, p in found.values()),
        file_bytes=sum(size for size, _ in found.values()),
        buffer_bytes=block_bytes_max(ahead),
    )


class _Choice:
    """With the output layer in memory, or on disk."""

    def __init__(self, total: int, parts: _Parts, *, is_head_resident: bool):
        self._layers = parts.layers
        head = [] if parts.head is None else [parts.head]
        self._head = [] if is_head_resident else head
        self._embedding = [] if parts.embedding is None else [parts.embedding]
        streamed = [*parts.layers, *self._head]
        # Tensors of another type are converted one by one, beside the buffers.
        self.buffers = BUFFERS * max(part.buffer_bytes for part in streamed)
        always = total - sum(part.nbytes for part in parts.all)
        self.least = always + self.buffers
        self.least += sum(part.nbytes for part in head) if is_head_resident else 0

    def on_disk(self, limit: int) -> list[_Part]:
        return [*self._read(limit), *self._embedding]

    def read_bytes(self, limit: int) -> int:
        return sum(part.file_bytes for part in self._read(limit))

    def _read(self, limit: int) -> list[_Part]:
        """Resident layers are spread evenly: the disk reads on while they compute."""
        room, count = limit - self.least, len(self._layers)
        fitting = min(count, room // max(part.nbytes for part in self._layers))
        resident = {number * count // fitting for number in range(fitting)}
        left = [part for number, part in enumerate(self._layers) if number not in resident]
        return [*left, *self._head]


def _bytes_of(parameters: Any) -> int:
    return sum(p.nbytes for p in {id(p): p for p in parameters}.values())


def _places(model: nn.Module, on_disk: set[str]) -> dict[str, str]:
    """Of the largest modules that are wholly here or there."""
    found: dict[str, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        if name in on_disk:
            found[name] = "disk"
        elif name and not any(each.startswith(f"{name}.") for each in on_disk):
            found[name] = "cpu"
        else:
            prefix = f"{name}." if name else ""
            found.update((prefix + own, "cpu") for own in (*module._parameters, *module._buffers))
            for child, inner in module.named_children():
                visit(prefix + child, inner)

    visit("", model)
    return found


def _is_converted(model: Any) -> bool:
    """Whether the checkpoint's tensors are others than the model's, as experts one by one are."""
    return any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model))


def check_accelerate(what: str) -> None:
    """That the library is there whose hooks bring weights and take them away.

    Raises
    ------
    ImportError
        It is not; names the extra.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(
            f"{what}: needs the package accelerate, which must be installed, and is not; run: pip "
            "install 'kvswap_torch[distributed]'"
        )


def load_within(
    name: str, limit: int, dtype: torch.dtype | str = "auto", folder: str | Path = "."
) -> Any:
    """See `kvswap_torch.integrations.load_on_disk`."""
    what = "weights_memory"
    check_accelerate(what)
    if name.endswith(".gguf"):
        raise ConfigError(f"{what}: must be of a model's folder, got the GGUF file {name}")
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise ConfigError(f"{what}: must be of a model's folder, got {name!r}, which is none")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ConfigError(f"dtype: must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{what}: must be of a model whose weights are not quantised, since its layers are "
            f"loaded whole, got {name}"
        )
    if isinstance(dtype, str):
        dtype = stored_dtype(name, config) if dtype == "auto" else getattr(torch, dtype)
    plan = plan_weights(unloaded_model(config, dtype), stored_as(name, config), limit, what)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, name, dtype=dtype)
    model = load() if plan is None else load_planned(load, plan, folder)
    make_ready(model)
    return model.eval()


def load_planned(load: Any, plan: WeightsPlan, folder: str | Path) -> Any:
    """A model that keeps to a plan; what is on disk is read ahead.

    Parameters
    ----------
    load
        ``from_pretrained`` with all arguments but places.
    folder
        Weights that must be written again go to a folder in it, which is gone with the model.

    Raises
    ------
    StorageError
        The folder lacks room for them.
    """
    # It warns of parameters on the meta device, which is what was asked for.
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    if not plan.is_rewritten:
        model = load(device_map=plan.places)
    else:
        _check_room(plan, folder)
        written = tempfile.mkdtemp(prefix=".kvswap-weights-", dir=folder)
        try:
            model = load(device_map=plan.places, offload_folder=written)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise
        weakref.finalize(model, shutil.rmtree, written, ignore_errors=True)
    _hold(model)
    give_back_memory()
    return model.eval()


def _check_room(plan: WeightsPlan, folder: str | Path) -> None:
    free = shutil.disk_usage(folder).free
    if plan.read_bytes > free:
        raise StorageError(
            f"weights: {folder} must have {format_bytes(plan.read_bytes)} free, since this "
            f"checkpoint's weights are written again as the model has them, got "
            f"{format_bytes(free)}; give another --path"
        )


def make_ready(model: Any) -> bool:
    """Has linear layers be `HalfLinear`, and layers on disk read ahead; as `replace_linear`."""
    is_wide = replace_linear(model)
    is_wide |= _replace_offloaded(model)
    read_ahead(model)
    return is_wide


def _hold(model: nn.Module) -> None:
    """Copies resident weights out of the mapped files; their modules need no hooks."""
    from accelerate.hooks import remove_hook_from_module

    for module in model.modules():
        hooks = offloading_hooks(module)
        if not hooks and hasattr(module, "_hf_hook"):
            remove_hook_from_module(module)
            if getattr(module.forward, "__func__", None) is type(module).forward:
                del module.forward  # its class's own, which accelerate leaves on the module
        for hook in hooks:
            if hook.tied_params_map is not None:
                hook.tied_params_map.clear()  # by address, of tensors that go now
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.clone()


def _replace_offloaded(model: nn.Module) -> bool:
    from accelerate.hooks import add_hook_to_module

    is_wide = False
    for parent, name, layer in list(_offloaded_linears(model)):
        half = HalfLinear.of(layer)
        setattr(parent, name, add_hook_to_module(half, layer._hf_hook))
        is_wide |= half.is_wide
    return is_wide


def _offloaded_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Plain ones in half precision whose weights come and go, by parent and name."""
    for parent in model.modules():
        for name, layer in parent.named_children():
            is_plain = type(layer) is nn.Linear and layer.weight.dtype in HALF
            has_others = layer._forward_hooks or layer._forward_pre_hooks
            if is_plain and not has_others and offloading_hooks(layer):
                yield parent, name, layer
