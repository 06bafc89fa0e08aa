"""Whether a saved cache may be opened here: its model, its tokens, who can read it."""

from __future__ import annotations

import json
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import torch

from kvswap_torch.config import ModelIdentity
from kvswap_torch.errors import ConfigError, CorruptionError, StorageError
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.saved_facts import check_facts, check_layers
from kvswap_torch.hf.weights_digest import WeightsDigest, is_comparable, weights_of

NAMED_MAX = 3  # of tensors that differ


def known_of(identity: ModelIdentity) -> dict[str, Any]:
    return {name: value for name, value in vars(identity).items() if value is not None}


def rotary_of(parts: ModelParts) -> Any:
    """What a model's config says of positions, fit for JSON."""
    rope = getattr(parts.config, "rope_parameters", None)
    return json.loads(json.dumps(rope, sort_keys=True, default=str))


def check_model(facts: dict[str, Any], parts: ModelParts, path: str) -> None:
    """Raises a `ConfigError` unless the saved cache is of a model that looks like this one.

    `facts` are checked whole first: a `CorruptionError` names what is damaged.
    """
    check_facts(facts, path)
    saved = ModelIdentity(**facts["model"])
    differences = saved.differences(parts.identity)
    if saved.dtype != parts.identity.dtype:
        differences["dtype"] = saved.dtype, parts.identity.dtype
    if differences:
        told = ", ".join(f"{n} {ours} (this model: {it})" for n, (ours, it) in differences.items())
        raise ConfigError(
            f"open: {path} must be of the model it is opened with, but was made by {told}"
        )
    rotary = rotary_of(parts)
    if facts.get("rotary") != rotary:
        raise ConfigError(
            f"open: {path} must be of a model with the same rotary parameters, but was made with "
            f"{facts.get('rotary')} (this model: {rotary})"
        )
    check_layers(facts, parts, path)


def check_weights(facts: dict[str, Any], weights: WeightsDigest, path: str) -> bool:
    """Whether a saved cache says which weights it was made by; if so, they are these.

    Raises
    ------
    ConfigError
        They are others; names the first tensors that differ.
    """
    saved = facts.get("weights")
    if not is_comparable(saved):
        return False
    names = weights.differences(saved)
    if names:
        told = ", ".join(names[:NAMED_MAX]) + ("" if len(names) <= NAMED_MAX else ", ...")
        raise ConfigError(
            f"open: {path} must be of this model, but {len(names)} of its weights "
            f"{'is' if len(names) == 1 else 'are'} not what the cache was made by ({told}): "
            "training, an adapter, quantisation or another checkpoint; open it with the model "
            "that it was made by, or read the text anew (probe=False skips this)"
        )
    return True


def check_made_by(facts: dict[str, Any], parts: ModelParts, path: str, probe: bool) -> None:
    """`check_model` and, where that is asked for, `check_weights`.

    A warning where an earlier kvswap_torch saved the cache.
    """
    check_model(facts, parts, path)
    if not probe or check_weights(facts, weights_of(parts), path):
        return
    warnings.warn(
        f"KVSwapCache: {path} does not say which weights it was made by, so only the keys and "
        "values of its first tokens were compared; save it again, and it will",
        RuntimeWarning,
        stacklevel=3,
    )


def check_values(value_dim: int, parts: ModelParts, path: str) -> None:
    """Values of a saved cache: as the model's, or as wide as its keys, with zeros behind.

    Parameters
    ----------
    value_dim
        What the cache says; 0: as wide as keys.
    """
    if value_dim not in (0, parts.shape.head_dim, parts.value_dim):
        raise CorruptionError(
            f"open: {path} must have values of {parts.value_dim} numbers a head, as the model's, "
            f"or of {parts.shape.head_dim} with zeros behind, got {value_dim}"
        )
    if parts.device.type != "cpu" and value_dim not in (0, parts.shape.head_dim):
        raise ConfigError(
            f"open: {path} has values of {value_dim} numbers a head beside keys of "
            f"{parts.shape.head_dim}, which a device's kernels do not take: open it with the model "
            "on the CPU, or read the text anew"
        )


def check_tokens(saved: torch.Tensor | None, wanted: torch.Tensor | None, path: str) -> None:
    """Raises a `ConfigError` naming the first token that differs; none wanted: all are right."""
    if wanted is None:
        return
    if saved is None:
        raise ConfigError(
            f"open: input_ids must be left out for {path}, which was made from embeddings"
        )
    wanted = torch.as_tensor(wanted).cpu()
    wanted = wanted if wanted.dim() == 2 else wanted[None]
    if wanted.dim() != 2 or wanted.shape[0] != saved.shape[0]:
        raise ConfigError(
            f"open: input_ids must be of the {saved.shape[0]} sequences of {path}, got "
            f"{list(wanted.shape)}"
        )
    count = min(wanted.shape[1], saved.shape[1])
    differs = (wanted[:, :count] != saved[:, :count]).nonzero()
    if len(differs):
        sequence, position = differs[differs[:, 1].argmin()].tolist()
        raise ConfigError(
            f"open: {path} must hold the tokens of input_ids, but token {position} of sequence "
            f"{sequence} is {int(saved[sequence, position])}, got {int(wanted[sequence, position])}"
        )


def warn_of_readers(path: str) -> None:
    """Of a cache that others can read, or made."""
    try:
        facts = [os.stat(path), *(os.stat(Path(path) / name) for name in os.listdir(path))]
    except OSError as error:
        raise StorageError(
            error.errno, f"open: {path} must be readable, got {error.strerror}", error.filename
        ) from error
    if any(each.st_mode & (stat.S_IRWXG | stat.S_IRWXO) for each in facts):
        warnings.warn(
            f"KVSwapCache: {path} can be reached by others than its owner: who has it has the "
            "text; chmod -R go= it",
            RuntimeWarning,
            stacklevel=3,
        )
    if any(each.st_uid != os.getuid() for each in facts):
        warnings.warn(
            f"KVSwapCache: {path} belongs to another user, who decides what it says",
            RuntimeWarning,
            stacklevel=3,
        )
