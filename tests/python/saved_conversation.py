"""A conversation that stops, to be saved, and goes on from what was saved."""

from __future__ import annotations

from pathlib import Path

import torch

from kvswap_torch import KVSwapCache
from tests.python.tiny_models import TIGHT, greedy, prompt


def filled(model, path: Path, config=TIGHT, batch: int = 1, tokens: int = 48, padding=()):
    cache = KVSwapCache(model, path=path, config=config)
    inputs = prompt(batch, tokens, padding=padding)
    out = greedy(model, inputs, cache, tokens=4)
    return cache, out


def goes_on(model, cache, out, padding=(), tokens: int = 10, **options) -> list[list[int]]:
    """More tokens, from what `out` has."""
    mask = torch.ones_like(out)
    for i, count in enumerate(padding):
        mask[i, :count] = 0
    return greedy(
        model, {"input_ids": out, "attention_mask": mask}, cache, tokens, **options
    ).tolist()
