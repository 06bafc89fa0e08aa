"""Vision models' saved caches: positions after an image go on in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvswap_torch import KVSwapCache
from tests.python.test_hf_vision import build, inputs_of
from tests.python.tiny_models import COVERING, greedy, has_native

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
ASKED = torch.tensor([[7, 8, 9]])


def with_text_before(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The image stands behind so many tokens of text."""
    text = torch.randint(3, 80, (1, tokens), generator=torch.Generator().manual_seed(1))
    given = dict(inputs)
    given["input_ids"] = torch.cat([text, inputs["input_ids"]], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "mm_token_type_ids" in inputs:
        kinds = inputs["mm_token_type_ids"]
        given["mm_token_type_ids"] = torch.cat([torch.zeros_like(text), kinds], 1)
    return given


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "InternVL"])
@pytest.mark.parametrize("before", [0, 20])
def test_tokens_are_those_that_the_saved_cache_gives(
    tmp_path: Path, name: str, before: int
) -> None:
    model = build(name)
    inputs = with_text_before(inputs_of(name, 1, False), before)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        told = greedy(model, inputs, cache, tokens=4)
        ids = torch.cat([told, ASKED], 1)
        with cache.fork() as fork:
            expected = greedy(model, {"input_ids": ids}, fork, tokens=8)
        # Another text, whose positions are others, is read before this one is saved.
        with KVSwapCache(model, tmp_path, COVERING) as other:
            greedy(model, {"input_ids": ids[:, :before]} if before else inputs, other, tokens=1)
        cache.save(tmp_path / "book.kvswap")
    fresh = build(name)  # as another process has it
    with KVSwapCache.open(fresh, tmp_path / "book.kvswap", path=tmp_path) as opened:
        assert torch.equal(greedy(fresh, {"input_ids": ids}, opened, tokens=8), expected)
        assert opened.stats().probe.startswith("passed: keys and values of ")
