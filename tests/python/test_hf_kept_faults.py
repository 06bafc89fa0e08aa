"""Faults under a cache that keeps tokens: what a failed pass paid them counts once."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from kvswap_torch import KVSwapCache, SwapConfig
from tests.python.faulty_conversation import converse, following, persistently
from tests.python.faulty_kernel import faulty_kernel
from tests.python.tiny_models import SMALL, has_native, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize("keeper", ["observed", "heavy"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_same_tokens_are_kept_after_the_nth_read_failed(
    keeper: str, batch: int, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    config = SwapConfig(
        groups_max=6,
        pages_max=8,
        keeper=keeper,
        keep_tokens=10,
        keep_window=3,
        keep_interval=3,
        reader="sync",
        **SMALL,
    )
    failures: list[str] = []
    with faulty_kernel() as disk:
        with KVSwapCache(model, path=tmp_path, config=config) as cache:
            undisturbed = converse(model, cache, batch, lambda step: step())
            turns = cache.stats().counters["turns"]
            assert turns > 4
        nth, struck = 1, True
        while struck:
            with KVSwapCache(model, path=tmp_path, config=config) as cache:
                disk.arm("read", nth=nth, lasts=True, error=errno.ENODEV)
                told = converse(
                    model, cache, batch, lambda step: persistently(step, disk, failures)
                )
                struck = disk.injected > 0
                disk.heal()
                assert cache.stats().counters["turns"] == turns, nth
            assert all(map(torch.equal, told, undisturbed)), (keeper, batch, nth)
            nth = following(nth)
    assert len(failures) > 10
