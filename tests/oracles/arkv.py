"""What ARKV's published code keeps of a prompt, and how it divides a layer's tokens.

`published` and `divided` ask it; numbers alone are stored.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from tests.oracles.repositories import cache_at, module_at

WINDOW = 32
VARIANCE = 263.8108280337562


class Code(NamedTuple):
    """Its two files."""

    calculator: Any
    cache: Any


def code_of(folder: Path) -> Code:
    room = folder / "arkv"
    calculator, config = module_at(room / "calculator.py"), module_at(room / "config.py")
    packages = {"arkv": types.ModuleType("arkv"), "arkv.config": config}
    cache = cache_at(room / "cache" / "mix_cache.py", **packages, **{"arkv.calculator": calculator})
    return Code(calculator, cache)


def _numbered(heads: int, first: int, count: int) -> torch.Tensor:
    """States that say which token they are of: ``[1, heads, count, 1]``."""
    return torch.arange(first, first + count).float().view(1, 1, -1, 1).expand(1, heads, -1, 1)


def _settings(tokens: int, layers: int) -> Any:
    return types.SimpleNamespace(
        window_size=WINDOW, cache_size=tokens, key_size=tokens - WINDOW, layer_num=layers
    )


def of_prompt(folder: Path, tokens: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Which `tokens` of each KV head stay after the prompt, the window among them."""
    code = code_of(folder)

    def kept(query: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
        heads, length, dim = keys.shape[1:]
        groups = query.shape[1] // heads
        asked = query[:, :, -WINDOW:] @ keys.repeat_interleave(groups, 1).mT * dim**-0.5
        unseen = torch.full((WINDOW, length), float("-inf")).triu(length - WINDOW + 1)
        weights = (asked + unseen).softmax(-1)
        worth = code.calculator.calculate_heavy_hitter(weights, VARIANCE, WINDOW, 1, heads, groups)
        cache = code.cache.MixCache()
        cache.update(_numbered(heads, 0, length), _numbered(heads, 0, length), 0)
        cache.update_score(numpy.float32(1), worth)
        cache = code.cache.MixPrefillKVCompressor(_settings(tokens, 1))(cache, length)
        stay, _ = cache.get_kv_cache(0)
        return [sorted(int(number) for number in head) for head in stay[0, :, :, 0]]

    return kept


def of_layers(folder: Path) -> Callable[[list[float], int], dict[str, list[int]]]:
    """Of layers that are worth so much, when `tokens` no longer suffice: how many before the window
    may stay as they are, and how many are in e4m3 after it has made room.
    """
    code = code_of(folder)

    def divided(worth: list[float], tokens: int) -> dict[str, list[int]]:
        length, settings = tokens + 50, _settings(tokens, len(worth))
        cache = code.cache.MixCache()
        read = code.cache.MixPrefillKVCompressor(settings)
        for layer, one in enumerate(worth):
            cache.update(_numbered(1, 0, length), _numbered(1, 0, length), layer)
            cache.update_score(numpy.float32(one), torch.rand(1, 1, length - WINDOW))
            cache = read(cache, length)
        in_dtype = list(cache.origin_budget)
        rounded = []
        for layer in range(len(worth)):
            cache.update(_numbered(1, length, 1), _numbered(1, length, 1), layer)
            paid = torch.rand(1, 1, 1, tokens + 1)
            cache = code.cache.MixDecodingKVCompressorLayerWise(settings)(cache, paid, layer)
            left = cache.layers[layer].quant_keys
            rounded.append(0 if left is None else left.shape[2])
        return {"in_dtype": in_dtype, "rounded": rounded}

    return divided
