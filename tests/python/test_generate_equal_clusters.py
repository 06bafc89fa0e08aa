"""What `test_generate_equal.py` holds, of caches whose tokens enter clusters of similar keys.

With a budget that covers the context nothing is chosen, but clusters are made, grow, split and are
cropped beneath, in pools; those in the order of sealing have `test_presets_generate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import KVSwapCache, SwapConfig
from tests.python import test_generate_equal as of_groups
from tests.python.tiny_models import SMALL, greedy, has_native, prompt

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
COVERING = SwapConfig(
    groups_max=400,
    pages_max=400,
    grouping="clusters",
    rows="centroid",
    layout="pools",
    cluster_tokens=4,
    cluster_tokens_max=10,
    split_factor=0.5,
    pending_tokens=2,
    **{name: value for name, value in SMALL.items() if name != "rank"},
)

model = of_groups.model
globals().update({name: test for name, test in vars(of_groups).items() if name.startswith("test_")})


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens caches with clusters; closes them all at the end."""
    caches = []

    def open_one(model: Any, **arguments: Any) -> KVSwapCache:
        caches.append(KVSwapCache(model, path=tmp_path, config=COVERING, **arguments))
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close()


def test_a_text_that_is_changed_again_and_again(llama, open_cache):
    """Numbers of clusters that a crop empties are given to others: each token is still there."""
    cache, plain = open_cache(llama), DynamicCache(config=llama.config)
    document = prompt(1, 60)["input_ids"]
    for seed, cut in enumerate((55, 40, 59, 23, 10, 47, 31, 3, 52, 17)):
        ids = torch.cat([document[:, :cut], prompt(1, 80 - cut, seed=30 + seed)["input_ids"]], 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = greedy(llama, inputs, plain, tokens=12)
        assert torch.equal(greedy(llama, inputs, cache, tokens=12), expected)
        document = expected
        for each in (cache, plain):
            each.crop(cut - each.get_seq_length())
    counters = cache.stats().counters
    assert counters["cluster_splits"] > 0
