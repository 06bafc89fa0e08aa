"""`bench reads` and `bench cluster_steps`: what is read for a token, and clusters step by step."""

from __future__ import annotations

import pytest
import torch

from bench.cluster_steps import WITHIN, retrieved_within, runs, told, walk_through
from bench.quality.methods import product_settings
from bench.quality.product import Product
from bench.reads import covered_ns, follow, opened
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, tiny_model, tokens_of

needs_native = pytest.mark.skipif(not has_native(), reason="needs the compiled library")
PROMPT, STEPS = 200, 24


def test_reads_that_overlap_take_their_time_once():
    assert covered_ns([]) == 0
    assert covered_ns([(0, 10), (5, 20), (30, 40), (32, 35)]) == 30


def test_tokens_that_are_no_neighbours_take_reads_of_their_own():
    assert [runs(torch.tensor(each)) for each in ([], [7], [1, 2, 3, 7, 9, 10])] == [0, 1, 3]


def test_what_is_retrieved_soon_is_counted_of_steps_that_enough_follow():
    retrieved, asked = [{1}, {2}, {3}, {1}], [{1, 2}, {3}, {1}, {1}]
    # Step 0 asks for 1 and 2, step 1 for 3; of steps 2 and 3 too little follows.
    assert retrieved_within(retrieved, asked, steps=1, last=2) == (2, 3)
    assert retrieved_within(retrieved, [{1}, {1}, set(), set()], 2, 2) == (1, 2)


@needs_native
@pytest.mark.parametrize("name", ["product:groups_max=4,group_tokens=4,rank=8", "dynakv"])
def test_what_is_read_is_counted_from_the_prompt_on(name, tmp_path):
    model, ids = tiny_model("llama"), tokens_of(1, PROMPT + STEPS)[0]
    few = "" if name != "dynakv" else ":groups_max=4,pages_max=8"
    size = Bytes(model_parts(model), len(ids), tmp_path)
    product = Product.named(name + few, product_settings(name + few), size)
    with opened(product, model, tmp_path, len(ids), "emmc") as cache:
        told = follow(model, cache, ids, PROMPT)
        whole = cache.stats()
    assert 0 < told["bytes"] <= whole.bytes_read / STEPS + 1
    assert told["requests"] > 0 and told["tokens_a_request"] > 0
    assert 0 <= told["found_in_memory"] < 1
    # An eMMC's request takes at least its latency, 0.2 ms, of two at a time.
    assert told["device_ms"] >= 0.1 * told["requests"]


@needs_native
def test_clusters_of_a_text_are_followed_in_every_layer():
    model, ids = tiny_model("llama"), tokens_of(1, 400)[0]
    walks = walk_through(model, ids, prompt=300, pages=6, size=16)
    assert len(walks) == model.config.num_hidden_layers
    assert all(len(walk.retrieved) == 100 for walk in walks)
    assert all(0 < len(chosen) <= 6 for walk in walks for chosen in walk.retrieved)
    found = told(walks)
    assert 1 <= found["tokens_a_read_in_order"] <= found["tokens_a_read_in_clusters"] <= 32
    assert found["updates"] > 0
    for name in ("updated", "any"):
        shares = [found["retrieved_within"][steps][name] for steps in WITHIN]
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
