"""Layers that are not on disk, as JSON and tensors of a saved cache.

What such a layer is made of is transformers' own affair: tensors, numbers and dictionaries of them.
Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvswap_torch.errors import KVSwapError

Tensors = dict[str, torch.Tensor]
# Attributes that a layer has when it has seen keys, and their kinds.
_LATER = {"dtype": torch.dtype, "device": torch.device}


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
    fresh = dict(vars(layer))
    # Without a switch of another version of transformers' a layer is as it was there.
    asked = {name for name, value in fresh.items() if not isinstance(value, bool)}
    asked |= {name for name in fresh if name.startswith(("is_", "has_"))}
    missing = sorted(asked - set(packed["parts"]))
    if missing:
        raise ValueError(f"a {type(layer).__name__} must have {', '.join(missing)}")
    for name, value in packed["parts"].items():
        if name not in {*fresh, *_LATER}:
            raise ValueError(f"a {type(layer).__name__} has no {name}")
        made = unpack(value, tensors, device)
        _check_kind(f"{type(layer).__name__}.{name}", made, _LATER.get(name), fresh.get(name))
        setattr(layer, name, made)


def check_layer(layer: Any, batch: int, tokens: int) -> None:
    """That a layer may be one of a cache of so many sequences and tokens.

    Raises
    ------
    ValueError
        It has tensors of other sequences, keys that do not go with values, or more tokens.
    """
    name = type(layer).__name__
    for tensor in _tensors_in(vars(layer)):
        if tensor.dim() > 0 and tensor.numel() > 0 and tensor.shape[0] != batch:
            raise ValueError(f"a {name} must be of {batch} sequences, got {list(tensor.shape)}")
    keys, values = (getattr(layer, what, None) for what in ("keys", "values"))
    if (keys is None) != (values is None):
        raise ValueError(f"a {name} must have keys and values, or none of them")
    if getattr(layer, "is_initialized", False) and keys is not None and keys.numel() > 0:
        if keys.dim() != 4 or values.shape[:-1] != keys.shape[:-1] or keys.shape[-2] > tokens:
            raise ValueError(
                f"a {name} must have keys and values of at most {tokens} tokens, got "
                f"{list(keys.shape)} and {list(values.shape)}"
            )
        length = layer.get_seq_length()
        if length != tokens or (hasattr(layer, "dtype") and keys.dtype != layer.dtype):
            raise ValueError(f"a {name} must hold the {tokens} tokens, got {length}")


def _check_kind(where: str, made: Any, later: Any, fresh: Any) -> None:
    """What a new layer has decides what a saved one may have; a count may have grown."""
    if later is not None:
        is_right = isinstance(made, later)
    elif isinstance(fresh, bool):
        is_right = isinstance(made, bool)
    elif isinstance(fresh, int):
        is_whole = isinstance(made, int) and not isinstance(made, bool) and made >= 0
        is_right = is_whole and (fresh == 0 or made == fresh)
    elif isinstance(fresh, float | str):
        is_right = made == fresh and type(made) is type(fresh)
    elif isinstance(fresh, torch.Tensor) and fresh.dim() == 0:
        is_right = isinstance(made, torch.Tensor) and made.dim() == 0 and bool(made == fresh)
    elif isinstance(fresh, dict):
        is_right = isinstance(made, dict)
    elif isinstance(fresh, list | tuple):
        is_right = isinstance(made, list)
    else:
        is_right = made is None or isinstance(made, torch.Tensor | dict | list)
    if not is_right:
        raise ValueError(f"{where} must be as a new one has it ({fresh!r}), got {made!r}")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype must be torch's, got {name}")
    return dtype
