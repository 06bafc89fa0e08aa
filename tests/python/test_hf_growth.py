"""A text that outgrows what its first pass promised, where nothing is divided anew."""

from __future__ import annotations

import re

import pytest

from kvswap_torch import BudgetError, KVSwapCache, SwapConfig
from tests.python.tiny_models import forward, prompt, tiny_model

CHUNK = 150
MEANS = SwapConfig(summary={"kind": "mean"})  # whose rows are not made again


@pytest.fixture(scope="module")
def long_llama():
    return tiny_model("llama", max_position_embeddings=8192)


def read_in_pieces(model, cache, tokens: int) -> None:
    for begin in range(0, tokens, CHUNK):
        forward(model, prompt(1, CHUNK, seed=begin)["input_ids"], cache, logits_to_keep=1)


def least_budget(model, path) -> int:
    """That a text of one chunk can begin with: named when a cache is opened, then by its pass."""
    budget = 1
    for _ in range(3):
        try:
            with KVSwapCache(model, path, MEANS, budget) as cache:
                read_in_pieces(model, cache, CHUNK)
            return budget
        except BudgetError as error:
            budget = int(re.search(r"at least (\d+)", str(error))[1])
    raise AssertionError(f"{budget} bytes are named, and are not enough")


def test_a_text_that_outgrows_its_first_pass_names_what_to_give(long_llama, tmp_path):
    budget = least_budget(long_llama, tmp_path) + 2000
    with KVSwapCache(long_llama, tmp_path, MEANS, budget) as cache:
        with pytest.raises(BudgetError) as error:
            read_in_pieces(long_llama, cache, 8000)
        held = cache.get_seq_length()
    message = str(error.value)
    assert held >= CHUNK + 1024  # what settings were chosen for
    assert (
        f"chosen for {CHUNK + 1024:,} tokens, since the first forward pass had {CHUNK}" in message
    )
    assert f"max_context={held + CHUNK} or more" in message
    assert f"prefill_chunk_size={CHUNK}" in message


def test_with_max_context_a_text_in_pieces_fits(long_llama, tmp_path):
    """And one that goes beyond it is refused by that name alone."""
    limits = {"kv_memory_bytes": "1MiB", "max_context": 3000, "max_batch": 1}
    with KVSwapCache(long_llama, tmp_path, **limits) as cache:
        read_in_pieces(long_llama, cache, 3000)
        with pytest.raises(BudgetError, match=r"within max_context \(3000 tokens\), got 3150"):
            read_in_pieces(long_llama, cache, CHUNK)
