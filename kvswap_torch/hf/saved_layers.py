"""Layers that are not on disk, as JSON and tensors of a saved cache.

What such a layer is made of is transformers' own affair: tensors, numbers and dictionaries of them.
Anything else is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from kvswap_torch.errors import KVSwapError

Tensors = dict[str, torch.Tensor]


def pack(name: str, value: Any, tensors: Tensors) -> Any:
    """JSON that stands for `value`; what it has of tensors goes to `tensors`, named after `name`.

    Raises
    ------
    KVSwapError
        Something of another kind.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() == 0:
            return {"empty": list(value.shape), "dtype": _name(value.dtype)}
        tensors[name] = value if value.dim() else value.reshape(1)
        return {"tensor": name, "dims": value.dim()}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.device):
        return {"device": True}
    if isinstance(value, dict) and all(isinstance(key, int) for key in value):
        return {"of": [[key, pack(f"{name}.{key}", each, tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [pack(f"{name}.{i}", each, tensors) for i, each in enumerate(value)]}
    raise KVSwapError(
        f"save: {name} must be of tensors and numbers to be saved, got a {type(value).__name__}"
    )


def unpack(packed: Any, tensors: Tensors, device: torch.device) -> Any:
    """What `pack` was given, tensors on `device`."""
    if not isinstance(packed, dict):
        return packed
    match packed:
        case {"empty": shape, "dtype": dtype}:
            return torch.empty(shape, dtype=_dtype(dtype), device=device)
        case {"tensor": name, "dims": dims}:
            tensor = tensors[name].to(device)
            return tensor if dims else tensor.reshape(())
        case {"dtype": dtype}:
            return _dtype(dtype)
        case {"device": _}:
            return device
        case {"of": pairs}:
            return {int(key): unpack(each, tensors, device) for key, each in pairs}
        case {"list": values}:
            return [unpack(each, tensors, device) for each in values]
    raise ValueError(f"a layer must be of known parts, got {sorted(packed)}")


def pack_layer(index: int, layer: Any, tensors: Tensors) -> dict[str, Any]:
    """One layer of a cache."""
    parts = {
        name: pack(f"layer.{index}.{name}", value, tensors) for name, value in vars(layer).items()
    }
    return {"kind": type(layer).__name__, "parts": parts}


def unpack_layer(packed: dict[str, Any], layer: Any, tensors: Tensors, device) -> None:
    """Makes a new `layer` what the saved one was.

    Raises
    ------
    ValueError, KeyError, TypeError
        It is another kind of layer's.
    """
    if packed["kind"] != type(layer).__name__:
        raise ValueError(f"a layer must be a {type(layer).__name__}, got {packed['kind']}")
    known = {*vars(layer), "dtype", "device"}
    for name, value in packed["parts"].items():
        if name not in known:
            raise ValueError(f"a {type(layer).__name__} has no {name}")
        setattr(layer, name, unpack(value, tensors, device))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype must be torch's, got {name}")
    return dtype
