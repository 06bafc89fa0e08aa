"""Faults under a cache that keeps tokens: what a failed pass paid them counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.plug_ins import MostSimilarKey
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.plug_ins import TokenScores, Worth
from tests.python.faulty_conversation import at_every_call, converse, persistently
from tests.python.faulty_kernel import faulty_kernel
from tests.python.tiny_models import SMALL, has_native, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


class LongestKey(TokenScores):
    """A token is worth the length of its key."""

    def worth(self, layer, query, keys, values):
        return Worth(keys.float().norm(dim=-1).mean(1))


OWN = {
    "observed": {"keep_interval": 3, "keep_window": 3},
    "observed-disk": {"keep_interval": 3, "keep_window": 5, "keep_scores": "disk"},
    "observed-shared": {"keep_interval": 3, "keep_window": 3, "keep_share": "auto"},
    "heavy": {"keep_interval": 3, "keep_window": 3},
    "arkv": {"keep_window": 3, "keep_variance": 263.8},
    "arkv-mixed": {"keep_window": 3, "keep_variance": 263.8, "keep_ratio": 0.4},
    "given": {"keep_interval": 3, "rows": "given", "rank": 32},
}


@pytest.mark.parametrize("keeper", list(OWN))
@pytest.mark.parametrize("batch", [1, 4])
def test_the_same_tokens_are_kept_after_the_nth_read_failed(
    keeper: str, batch: int, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    config = SwapConfig(
        groups_max=6,
        pages_max=8,
        keeper=keeper.split("-")[0],
        keep_tokens=10,
        reader="sync",
        **SMALL | OWN[keeper],
    )

    def opened() -> KVSwapCache:
        given = keeper == "given"
        plug_ins = {"group_scores": MostSimilarKey(), "token_scores": LongestKey()} if given else {}
        return KVSwapCache(model, path=tmp_path, config=config, **plug_ins)

    failures: list[str] = []
    with faulty_kernel() as disk:

        def live(cache: KVSwapCache) -> list[torch.Tensor]:
            told = converse(model, cache, batch, lambda step: persistently(step, disk, failures))
            return [*told, torch.tensor(cache.stats().counters["turns"])]

        with opened() as cache:
            undisturbed = live(cache)
            assert undisturbed[-1] > 4
        at_every_call(disk, "read", opened, live, undisturbed)
    assert len(failures) > 10
