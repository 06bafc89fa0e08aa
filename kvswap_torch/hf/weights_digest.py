"""Which weights made a saved cache: a digest of each tensor that decides keys and values.

Of each tensor 256 pieces are looked at, spread evenly from its first element to its last, and all
of one that is small. So a model of any size takes milliseconds, and what training, merging or
quantising changes is seen, since it changes all of a tensor or whole rows of it. What it cannot see
is a change of a few elements of a large tensor.

Names are those in the decoder, whatever stands around it. Adapters count while they are active; the
output layer does not, since no key or value depends on it.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.offloaded import StoredTensors

VERSION = 1  # of how tensors are looked at; another one's digests cannot be compared
PIECES, PIECE_ELEMENTS = 256, 32
TENSORS_MAX = 4096  # above: those whose names differ by an inner number have one digest
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsDigest(NamedTuple):
    """What `weights_of` found.

    Parameters
    ----------
    tensors
        Name to 16 hexadecimal digits; None of what lies elsewhere and cannot be looked at.
    """

    tensors: dict[str, str | None]

    def facts(self) -> dict[str, Any]:
        """As a saved cache keeps it."""
        return {"version": VERSION, "tensors": self.tensors}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """Names of tensors that are not those of `saved`, in this model's order."""
        theirs = saved["tensors"]
        names = [*self.tensors, *(name for name in theirs if name not in self.tensors)]
        return [name for name in names if _differ(theirs, self.tensors, name)]


def is_comparable(saved: Any) -> bool:
    """Whether a saved cache's ``weights`` are there and of this version."""
    return isinstance(saved, dict) and saved.get("version") == VERSION


def weights_of(parts: ModelParts) -> WeightsDigest:
    """Of the model as it is now; equal weights give equal digests, on any device."""
    pieces: list[tuple[str, str, torch.Tensor | None]] = []
    for name, value in _values(parts):
        for label, tensor in _plain(name, value):
            about = f"{tensor.dtype} {list(tensor.shape)}"
            pieces.append((label, about, None if tensor.is_meta else _looked_at(tensor)))
    tensors: dict[str, str | None] = {}
    for (label, about, _), data in zip(pieces, _on_host([p for _, _, p in pieces]), strict=True):
        tensors[label] = None if data is None else _digest(about.encode(), data)
    tensors |= _adapter_facts(parts.outermost)
    return WeightsDigest(_fewer(tensors))


def _differ(theirs: dict[str, Any], ours: dict[str, Any], name: str) -> bool:
    """What could not be looked at, once, does not."""
    missing = object()
    one, other = theirs.get(name, missing), ours.get(name, missing)
    return one is not None and other is not None and one != other


def _values(parts: ModelParts) -> Iterator[tuple[str, Any]]:
    """What a checkpoint would have of the model, without what decides no key and no value."""
    outermost = parts.outermost
    output = outermost.get_output_embeddings()
    output = "" if output is None else _place_of(outermost, output)
    decoder = _place_of(outermost, parts.decoder)
    idle = _idle_adapters(outermost)
    stored = StoredTensors(outermost)
    for name, held in outermost.state_dict().items():
        if output and name.startswith(output):
            continue
        if any(name.startswith(module) and adapter in name[len(module) :].split(".")
               for module, adapters in idle for adapter in adapters):  # fmt: skip
            continue
        value = stored.get(name, held)
        name = name.removeprefix(decoder) if name.startswith(decoder) else f"({name})"
        yield name.replace(".base_layer.", "."), value


def _place_of(outermost: nn.Module, module: nn.Module) -> str:
    """How names of its tensors begin."""
    name = next((name for name, each in outermost.named_modules() if each is module), "")
    return f"{name}." if name else ""


def _plain(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors that a value is made of: quantised ones have several."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, bool | int | float | str):
            text = repr(value).encode()
            yield name, torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return
    if hasattr(value, "__tensor_flatten__"):
        for inner in value.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{inner}", getattr(value, inner))
        return
    yield name, value.detach()


def _looked_at(tensor: torch.Tensor) -> torch.Tensor:
    """``[bytes]`` uint8 of the pieces, on the tensor's device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    words = (tensor if tensor.dim() else tensor.reshape(1)).view(_WORDS[tensor.element_size()])
    count = words.numel()
    if count <= PIECES * PIECE_ELEMENTS:
        chosen = words.reshape(-1)
    elif words.is_contiguous():
        chosen = words.view(-1).index_select(0, _places(count, words.device))
    else:
        chosen = words[torch.unravel_index(_places(count, words.device), words.shape)]
    return chosen.contiguous().view(torch.uint8)


@functools.lru_cache(maxsize=64)
def _places(count: int, device: torch.device) -> torch.Tensor:
    last = count - PIECE_ELEMENTS
    starts = torch.tensor([last * i // (PIECES - 1) for i in range(PIECES)])
    return (starts[:, None] + torch.arange(PIECE_ELEMENTS)).flatten().to(device)


def _on_host(pieces: list[torch.Tensor | None]) -> list[bytes | None]:
    """Their bytes; one copy from each accelerator."""
    found: list[bytes | None] = [None] * len(pieces)
    devices = {piece.device for piece in pieces if piece is not None}
    for device in devices:
        places = [i for i, p in enumerate(pieces) if p is not None and p.device == device]
        if device.type == "cpu":
            for i in places:
                found[i] = pieces[i].numpy().tobytes()
            continue
        whole = torch.cat([pieces[i] for i in places]).cpu().numpy().tobytes()
        at = 0
        for i in places:
            found[i] = whole[at : at + pieces[i].numel()]
            at += pieces[i].numel()
    return found


def _adapters(outermost: nn.Module) -> Iterator[tuple[str, nn.Module, set[str]]]:
    """Modules that adapters were put into, as PEFT does it, and the names of those at work."""
    for name, module in outermost.named_modules():
        if not hasattr(module, "base_layer") or not hasattr(module, "active_adapters"):
            continue
        active = module.active_adapters
        active = {active} if isinstance(active, str) else set(active)
        if getattr(module, "disable_adapters", False) is True:
            active = set()
        merged = set(getattr(module, "merged_adapters", ()))  # in the weights already
        yield name, module, active - merged


def _idle_adapters(outermost: nn.Module) -> list[tuple[str, set[str]]]:
    """Of each such module the adapters that do nothing there."""
    idle = []
    for name, module, active in _adapters(outermost):
        known = {
            key for part in module.children() if isinstance(part, nn.ModuleDict) for key in part
        }
        known |= {
            key for part in module.children() if isinstance(part, nn.ParameterDict) for key in part
        }
        idle.append((f"{name}.", known - active))
    return idle


def _adapter_facts(outermost: nn.Module) -> dict[str, str]:
    """What is no tensor, and yet decides what an adapter adds."""
    facts = {}
    for name, module, active in _adapters(outermost):
        scaling = getattr(module, "scaling", {})
        scaling = scaling if isinstance(scaling, dict) else {}
        if active:
            told = sorted((each, repr(scaling.get(each))) for each in active)
            facts[f"({name}: scaling of adapters)"] = _digest(repr(told).encode())
    return facts


def _digest(*parts: bytes) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


def _fewer(tensors: dict[str, str | None]) -> dict[str, str | None]:
    """Experts that are apart, by the thousand, are one each layer."""
    if len(tensors) <= TENSORS_MAX:
        return tensors
    groups: dict[str, list[str]] = {}
    for name, digest in tensors.items():
        first, *rest = re.split(r"(?<=\.)(?=\d+\.)", name, maxsplit=1)
        head = re.match(r"\d+\.", rest[0]) if rest else None
        inner = rest[0][head.end() :] if head else ""
        label = first + (head.group() if head else "") + re.sub(r"(?<=\.)\d+(?=\.)", "*", inner)
        if digest is not None:
            groups.setdefault(label, []).append(f"{name}={digest}")
    return {label: _digest("\n".join(told).encode()) for label, told in groups.items()}
