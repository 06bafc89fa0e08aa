"""Faults under a cache that keeps tokens: what a failed pass paid them counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.plug_ins import LazyEviction, MostSimilarKey
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.plug_ins import TokenScores, Worth
from tests.how_long import lives
from tests.python.faulty_conversation import at_every_call, converse, persistently
from tests.python.faulty_kernel import faulty_kernel
from tests.python.tiny_models import SMALL, forward, has_native, prompt, tiny_model

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
    "given-attended": {"keep_interval": 3, "rows": "given", "rank": 32},
}


@pytest.mark.parametrize("keeper", list(OWN))
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.pairs(once=["keeper", "batch"])
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
        plug_ins: dict = {}
        if keeper.startswith("given"):
            scores = LazyEviction(0.02) if keeper == "given-attended" else LongestKey()
            plug_ins = {"group_scores": MostSimilarKey(), "token_scores": scores}
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
    assert len(failures) > lives(5, 10)


DROPS = {
    "rows": "none",
    "sink_tokens": 0,
    "groups_max": 1,
    "pages_max": 8,
    "group_tokens": 2,
    "tail_tokens": 4,
    "select_queries_max": 4,
    "keep_tokens": 12,
}
OF_PROMPTS = {
    "observed": {"keep_window": 4, "keep_pool": 1},
    "heavy": {"keep_window": 4, "keep_interval": 1},
    "arkv": {"keep_window": 4},
    "cake": {"keep_window": 4},
    "given": {"keep_interval": 0},
}


def opened_dropping(model, keeper: str, path: Path | None) -> KVSwapCache:
    """Of a keeper that a prompt decides for."""
    plug_ins = {"token_scores": LongestKey()} if keeper == "given" else {}
    config = SwapConfig(keeper=keeper, **DROPS | OF_PROMPTS[keeper])
    return KVSwapCache(model, path=path, config=config, **plug_ins)


@pytest.mark.parametrize("keeper", list(OF_PROMPTS))
@pytest.mark.parametrize("cut", [1, 4])
def test_a_prompts_last_tokens_read_again_find_what_the_prompt_kept(
    keeper: str, cut: int, tmp_path: Path
) -> None:
    model, ids = tiny_model("llama"), prompt(1, 60)["input_ids"]
    told = []
    for cropped in (0, cut):
        with opened_dropping(model, keeper, tmp_path) as cache:
            forward(model, ids, cache)
            if cropped:
                cache.crop(-cropped)
                forward(model, ids[:, -cropped:], cache)
            else:
                forward(model, ids[:, :1], cache)
            told.append(cache.stats().counters["tokens_kept"])
    assert told[1] == told[0] > 0


@pytest.mark.parametrize("has_path", [True, False])
@pytest.mark.parametrize("keeper", list(OF_PROMPTS))
def test_a_prompt_that_failed_changes_nobody_who_is_kept(
    keeper: str, has_path: bool, tmp_path: Path
) -> None:
    model, ids = tiny_model("llama"), prompt(1, 100)["input_ids"]

    def fail(*_):
        raise RuntimeError("of the test")

    def answers(fails: bool) -> torch.Tensor:
        with opened_dropping(model, keeper, tmp_path if has_path else None) as cache:
            forward(model, ids[:, :40], cache)
            for place in range(40, 44):
                forward(model, ids[:, place : place + 1], cache)
            if fails:
                hook = model.model.layers[2].register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="of the test"):
                    forward(model, ids[:, 50:70], cache)
                hook.remove()
            steps = [forward(model, ids[:, i : i + 1], cache) for i in range(44, 48)]
            return torch.cat(steps, 1)

    torch.testing.assert_close(answers(True), answers(False))
