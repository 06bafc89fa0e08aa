"""What Python keeps in a saved cache, checked whole before anything is made of it.

A manifest's checksum says that its bytes are those that were written; who wrote them may have been
another program, or a disk that was mended by hand. One place asks for every field that is used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from kvswap_torch.config.solution import identity_from
from kvswap_torch.errors import CorruptionError
from kvswap_torch.few_bits import BITS

if TYPE_CHECKING:
    from kvswap_torch._C import SavedCache
    from kvswap_torch.hf.families import ModelParts

_DIGITS = re.compile(r"[0-9a-f]{16}")
_TEXTS = ("model_type", "dtype", "config_hash")


def check_facts(facts: dict[str, Any], path: str) -> None:
    """What does not depend on the model that the saved cache is opened with.

    Raises
    ------
    CorruptionError
        A field is missing or of another kind; names it.
    """
    _check_model(facts.get("model"), path)
    _must(isinstance(facts.get("name", ""), str), path, "name", "be a string")
    _must(isinstance(facts.get("document", ""), str), path, "document", "be a string")
    _must(isinstance(facts.get("calibrated"), bool), path, "calibrated", "be true or false")
    estimated = facts.get("estimated")
    _must(
        isinstance(estimated, dict)
        and all(_is_number(k) and isinstance(v, str) for k, v in estimated.items()),
        path,
        "estimated",
        "say of layers what their projections were made from",
    )
    layers = facts.get("layers")
    _must(isinstance(layers, list) and all(map(_is_layer, layers)), path, "layers",
          "have null or kind and parts for each layer of the model")  # fmt: skip
    _must(facts.get("weights_format") in (None, *BITS), path, "weights_format",
          f"be one of {', '.join(BITS)}")  # fmt: skip
    _check_weights(facts.get("weights"), path)


def check_layers(facts: dict[str, Any], parts: ModelParts, path: str) -> None:
    """That the model's layers on disk, and no others, are none of `facts`' own.

    Of a model with an index every layer has one, if an empty one, which is in memory.

    Raises
    ------
    CorruptionError
    """
    layers = facts["layers"]
    on_disk = [index for index, layer in enumerate(layers) if layer is None]
    whole = [] if parts.index_topk else list(parts.disk)
    _must(
        len(layers) == len(parts.kinds) and on_disk == whole,
        path,
        "layers",
        f"be of the model's {len(parts.kinds)} layers, {len(whole)} of them on disk alone",
    )
    _must(
        all(int(layer) < len(parts.disk) for layer in facts["estimated"]),
        path,
        "estimated",
        f"name layers below {len(parts.disk)}",
    )


def tensors_of(folder: SavedCache) -> dict[str, torch.Tensor]:
    """What Python keeps beside the session, of the right shapes.

    Raises
    ------
    CorruptionError
    """
    tensors, path = folder.tensors(), folder.path
    whole = [folder.sequences, folder.tokens]
    for name, dtype in (("token_ids", torch.int64), ("valid", torch.bool)):
        found = tensors.get(name)
        _must(
            found is None or (found.dtype == dtype and list(found.shape) == whole),
            path,
            f"kept.{name}",
            f"be {dtype} of {whole}",
            "state.safetensors",
        )
    deltas = tensors.get("rope_deltas")
    _must(
        deltas is None or (deltas.dim() >= 1 and deltas.shape[0] == folder.sequences),
        path,
        "kept.rope_deltas",
        f"be of {folder.sequences} sequences",
        "state.safetensors",
    )
    return tensors


def _check_model(model: Any, path: str) -> None:
    _must(isinstance(model, dict), path, "model", "say which model the cache is of")
    try:
        identity = identity_from(model)
    except (TypeError, ValueError) as error:
        raise CorruptionError(f"open: {path} must say which model it is of: {error}") from error
    for name, value in vars(identity).items():
        is_right = isinstance(value, str) if name in _TEXTS else _is_whole(value)
        _must(value is None or is_right, path, f"model.{name}", "be as a model has it")


def _check_weights(weights: Any, path: str) -> None:
    if weights is None:
        return
    what = "have a version, and digests of tensors by their names"
    is_right = isinstance(weights, dict) and _is_whole(weights.get("version"))
    _must(is_right and isinstance(weights.get("tensors"), dict), path, "weights", what)
    digests = weights["tensors"].values()
    is_right = all(each is None or _is_digest(each) for each in digests)
    _must(is_right or weights["version"] != 1, path, "weights.tensors", what)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGITS.fullmatch(value) is not None


def _is_layer(layer: Any) -> bool:
    return layer is None or (
        isinstance(layer, dict)
        and isinstance(layer.get("kind"), str)
        and isinstance(layer.get("parts"), dict)
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _must(holds: bool, path: str, name: str, must: str, file: str = "manifest.json") -> None:
    if not holds:
        where = f"facts.{name}" if file == "manifest.json" else name
        raise CorruptionError(
            f"open: {path}/{file} is damaged: {where} must {must}; save the cache again"
        )
