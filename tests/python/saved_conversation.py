"""A conversation that stops, to be saved, and goes on from what was saved."""

from __future__ import annotations

from pathlib import Path

import torch

from kvswap_torch import KVSwapCache
from tests.python.tiny_models import TIGHT, forward, greedy, prompt


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


def beams_are_equal(model, caches: tuple[KVSwapCache, ...]) -> None:
    """Of two caches that hold the same: rows repeated, picked and decoded give equal logits."""
    for each in caches:
        each.batch_repeat_interleave(3)
        each.batch_select_indices(torch.tensor([2, 0]))
    for step in range(12):
        token = prompt(2, 1, seed=step)["input_ids"]
        one, other = (forward(model, token, each) for each in caches)
        assert torch.equal(one, other)
