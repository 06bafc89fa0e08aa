"""``keep=``: how many tokens a preset that drops the others attends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from kvswap_torch.cli.generate import _keep
from kvswap_torch.keep import with_keep
from tests.python.tiny_models import has_native, tiny_model

DROPPING = ("snapkv", "snapkv+", "cake", "arkv-origin", "h2o", "tova", "streaming", "window")


def attended(config: SwapConfig) -> int:
    kept = 0 if config.keeper == "newest" else config.keep_tokens
    return config.sink_tokens + kept + config.tail_tokens


@given(name=st.sampled_from(DROPPING), tokens=st.integers(40, 4096))
def test_so_many_are_attended_and_shared_alike(name: str, tokens: int) -> None:
    usual = SwapConfig.preset(name)
    config = with_keep(usual, tokens, None)
    assert attended(config) == tokens
    assert (config.sink_tokens, config.keeper) == (usual.sink_tokens, usual.keeper)
    if name == "h2o":
        assert abs(config.keep_tokens - config.tail_tokens) <= 1
    if name in ("snapkv", "arkv-origin", "tova"):
        assert config.tail_tokens == usual.tail_tokens


@given(share=st.floats(0.02, 1), context=st.integers(3000, 4096))
def test_a_share_is_one_of_the_context(share: float, context: int) -> None:
    config = with_keep(SwapConfig.preset("snapkv"), share, context)
    assert attended(config) == math.ceil(share * context)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0, "must be a number of tokens .* got 0"),
        (-3, "got -3"),
        (0.0, "got 0.0"),
        (1.5, "got 1.5"),
        (math.nan, "got nan"),
        (True, "got True"),
        ("many", "got 'many'"),
        (
            0.25,
            "must come with max_context, .* where the model says no max_position",
        ),
        (
            32,
            r"must be at least 33 tokens \(0 sinks, 32 newest and one of what is chosen\), got 32",
        ),
    ],
)
def test_what_it_cannot_be(keep, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_keep(SwapConfig.preset("snapkv"), keep, None)


def test_who_keeps_everything_has_none() -> None:
    for name in ("quest", "kvswap", "prkv"):
        with pytest.raises(
            ConfigError, match=r"must come with a preset that drops tokens .* reads"
        ):
            with_keep(SwapConfig.preset(name), 100, None)
    with pytest.raises(ConfigError, match="got one that restores all"):
        with_keep(SwapConfig.preset("exact"), 100, None)
    with pytest.raises(ConfigError, match="keep: 5000 makes 5000 tokens, but selection.recent_t"):
        with_keep(SwapConfig.preset("streaming"), 5000, None)
    with pytest.raises(ConfigError, match=r"got 0.001, 4 of 4000"):
        with_keep(SwapConfig.preset("snapkv"), 0.001, 4000)


def test_what_the_command_line_takes() -> None:
    assert [_keep(text) for text in (None, "400", "0.25", "1.0")] == [None, 400, 0.25, 1.0]
    assert isinstance(_keep("1"), int)
    assert isinstance(_keep("1.0"), float)
    with pytest.raises(ConfigError, match="--keep: must be a number of tokens or a share"):
        _keep("a quarter")


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", DROPPING)
def test_everything_kept_is_the_full_cache(name: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3", max_position_embeddings=4096)
    tokens = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, 97, (2, 700), generator=tokens)
    options = {"max_new_tokens": 20, "do_sample": False}
    limits = {"max_context": 720, "max_batch": 2, "preset": name}
    resident = {}
    for keep in (1.0, 0.2):
        with KVSwapCache(model, tmp_path, keep=keep, **limits) as cache:
            told = model.generate(prompt, past_key_values=cache, **options)
            assert attended(cache.driver.config) == math.ceil(keep * 720)
            stats = cache.stats()
            resident[keep] = stats.resident_bytes_peak
            # The last token is told and not read; groups wait in the tail for their end.
            dropped = 719 - math.ceil(keep * 720)
            # What leaves the tail after the prompt's turn is dropped where no turn follows; in one
            # of arkv's a quarter.
            late = dict.fromkeys(("snapkv", "snapkv+", "cake"), 20)
            late["arkv-origin"] = math.ceil(keep * 720) // 4
            assert dropped - 64 <= stats.tokens_dropped <= max(0, dropped) + late.get(name, 1)
        if keep == 1.0:
            assert torch.equal(told, model.generate(prompt, **options))
    assert resident[0.2] < resident[1.0]
