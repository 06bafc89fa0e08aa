"""Modules whose weights come and go: accelerate's hooks put them there for one forward call.

Between calls such a parameter is on the meta device. Where it computes, and what it holds, its
module's hook knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def offloading_hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks on `module` itself that bring its weights and take them away again."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # several may be in a row
    return [each for each in hooks if getattr(each, "offload", False)]


def devices_of(module: nn.Module) -> set[torch.device]:
    """Where the parameters of `module` and all below it compute."""
    found: set[torch.device] = set()
    for each in module.modules():
        places = {p.device for p in each.parameters(recurse=False)}
        hooks = offloading_hooks(each)
        if hooks and places:
            places.discard(torch.device("meta"))
            places.add(_as_device(hooks[-1].execution_device))
        found |= places
    return found


def _as_device(device: Any) -> torch.device:
    """As accelerate tells it: a number is a CUDA device's."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


class StoredTensors(Mapping[str, torch.Tensor]):
    """A model's offloaded tensors by their names in its state dict, each loaded when it is asked.

    Of a checkpoint in safetensors a tensor is a view of its file: what is not looked at is not
    read.
    """

    def __init__(self, model: nn.Module):
        self._maps: dict[str, tuple[Mapping[str, torch.Tensor], str]] = {}
        for place, module in model.named_modules():
            for hook in offloading_hooks(module):
                for name in held_names(module, hook):
                    # Past what reads ahead: it has buffers for what is about to run.
                    weights = getattr(hook.weights_map, "stored", hook.weights_map)
                    self._maps[f"{place}.{name}" if place else name] = weights, name

    def __getitem__(self, name: str) -> torch.Tensor:
        weights, inner = self._maps[name]
        return weights[inner]

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)


def held_names(module: nn.Module, hook: Any) -> list[str]:
    """Names of what the hook brings."""
    recurse = hook.place_submodules
    names = [name for name, _ in module.named_parameters(recurse=recurse)]
    if hook.offload_buffers:
        names += [name for name, _ in module.named_buffers(recurse=recurse)]
    return [name for name in names if name in hook.weights_map]


def let_go(module: nn.Module, recurse: bool = False) -> None:
    """Takes away what came for a call of `module` that was ended before its end.

    recurse: of all modules below it too.
    """
    for each in module.modules() if recurse else (module,):
        for hook in offloading_hooks(each):
            if not all(p.is_meta for p in each.parameters(recurse=hook.place_submodules)):
                hook.post_forward(each, ())
