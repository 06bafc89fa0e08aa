"""A conversation that stops, to be saved, and goes on from what was saved."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

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


def swapped_three_ways(model, folder: Path) -> tuple[torch.Tensor, KVSwapCache]:
    """A cache of two rows, a fork and the saved one swap their rows, and answer alike to the bit.

    The logits of 9 more tokens, and the cache that was opened, which is closed by now. In the end
    each is reset, and answers another text as the full cache does.
    """
    inputs, follow = prompt(2, 44, padding=(0, 5)), prompt(2, 9, seed=3)["input_ids"]
    mask = nn.functional.pad(inputs["attention_mask"], (0, 9), value=1)
    anew = inputs["input_ids"][:1, :20]
    with KVSwapCache(model, folder, TIGHT) as cache:
        forward(model, inputs["input_ids"], cache, attention_mask=inputs["attention_mask"])
        cache.save(folder / "saved")
        fork = cache.fork()
        opened = KVSwapCache.open(model, folder / "saved", path=folder)
        answers = []
        for each in (cache, fork, opened):
            with each:
                each.reorder_cache(torch.tensor([1, 0]))
                answers.append(forward(model, follow, each, attention_mask=mask[[1, 0]]))
                each.reset()
                torch.testing.assert_close(forward(model, anew, each), forward(model, anew, None))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    assert "passed" in opened.driver.probe
    return answers[0], opened
