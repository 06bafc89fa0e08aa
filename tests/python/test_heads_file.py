"""Files of what heads and layers are worth, and caches that are opened with them."""

from __future__ import annotations

import json

import pytest
import torch

from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from kvswap_torch.heads_file import read_heads
from tests.python.test_presets_generate import model_of
from tests.python.tiny_models import greedy, has_native, prompt

GOOD = {"heads": [[3, 0, 1, 2], [1, 2, 3, 0], [2, 3, 0, 1]], "layers": [1, 0.5, 2.5]}


def written(folder, told) -> str:
    path = folder / "heads.json"
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    return str(path)


def test_the_best_heads_of_each_layer(tmp_path):
    told = read_heads(written(tmp_path, GOOD), heads=2)
    assert told == {
        "retention.scoring_heads": (0, 3, 5, 6, 10, 11),
        "retention.layer_weights": (1.0, 0.5, 2.5),
    }
    named = GOOD | {"heads": {str(i): heads for i, heads in enumerate(GOOD["heads"])}}
    assert read_heads(written(tmp_path, named), heads=2) == told
    few = GOOD | {"heads": [heads[:2] for heads in GOOD["heads"]], "query_heads": 4}
    assert read_heads(written(tmp_path, few), heads=2) == told


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("{", "must be JSON"),
        ([], "must be an object with heads and layers"),
        ({"heads": []}, "must be an object with heads and layers"),
        (GOOD | {"heads": []}, "heads must be a list of numbers for each layer"),
        (GOOD | {"heads": {"0": [1], "2": [1]}}, "heads must be a list of numbers"),
        (GOOD | {"heads": [[1, "2"]]}, "heads must be a list of numbers"),
        (GOOD | {"layers": [1.0, -1.0, 2.0]}, "numbers that are not negative"),
        (GOOD | {"layers": [1.0, float("nan"), 2.0]}, "numbers that are not negative"),
        (GOOD | {"layers": [1.0]}, r"as many as lists of heads \(3\), got 1"),
        (GOOD | {"query_heads": "4"}, "query_heads must be an int, got '4'"),
        (GOOD | {"query_heads": 3}, "layer 0 must name at least 4 different heads below 3"),
        (GOOD | {"heads": [[0, 1, 2, 2]] * 3}, "layer 0 must name at least 4 different heads"),
    ],
)
def test_what_is_wrong_is_named(told, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_heads(written(tmp_path, told))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        read_heads(tmp_path / "none.json")


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_a_cache_keeps_by_it(tmp_path):
    """Layers keep by their shares; the config has plain settings, which a file keeps."""
    settings = read_heads(written(tmp_path, GOOD), heads=1)
    config = SwapConfig.preset("compresskv", **settings, keep_tokens=24, keep_layer_least=6)
    config = config.save(tmp_path / "config.json")
    assert SwapConfig.load(tmp_path / "config.json") == config
    model = model_of(2)
    with KVSwapCache(model, config=tmp_path / "config.json") as cache:
        greedy(model, prompt(2, 200), cache, tokens=5)
        stats = cache.stats()
        kept = [stats.counters[f"tokens_kept_{layer}"] for layer in range(3)]
        # Of 72 each has 6, and of 54 that are left its share; one too many goes to the smallest.
        assert kept == [6 + 14, 6 + 7 - 1, 6 + 34] and stats.tokens_kept == 24
        assert "24 a layer (12 to 40), " in str(stats)


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_layer_shares": (1.0, 1.0)}, "must be 3 numbers, one for each layer on disk"),
        ({"keep_heads": (0, 4, 12)}, "scoring_heads: must be below 12, 4 heads of 3 layers"),
        ({"keep_heads": (0, 1, 8)}, "must name a head of each layer, got none of 1"),
    ],
)
def test_another_models_file_is_refused(changes, message):
    given = {"keep_heads": (0, 4, 8), "keep_layer_shares": (1.0, 2.0, 1.0)} | changes
    with pytest.raises(ConfigError, match=message):
        KVSwapCache(model_of(2), config=SwapConfig.preset("compresskv", **given))


def test_fewer_tokens_than_a_layer_has_at_least(tmp_path):
    given = read_heads(written(tmp_path, GOOD))
    with pytest.raises(ConfigError, match="keep_tokens: must be at least keep_layer_least"):
        SwapConfig.preset("compresskv", **given, keep_tokens=10)


def test_several_processes_are_refused():
    from kvswap_torch.hf.placement import Placement, local_config

    split = Placement(world=2, stages=2, heads=4, kv_heads=2, last_layer=1)
    for config in (
        SwapConfig.preset("cake"),
        SwapConfig.preset("compresskv", keep_heads=(0, 4), keep_layer_shares=(1.0, 1.0)),
    ):
        with pytest.raises(ConfigError, match="where several processes run one model"):
            local_config(config, (0, 1), split)


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_cake_divides_what_a_prompt_says(tmp_path):
    """Of two sequences, each by its own attention, and no more in all than was said."""
    model = model_of(2)
    with torch.no_grad(), KVSwapCache(model, preset="cake", keep=64) as cache:
        model(**prompt(2, 200), past_key_values=cache)
        stats = cache.stats()
        kept = [stats.counters[f"tokens_kept_{layer}"] for layer in range(3)]
        assert len(set(kept)) > 1 and max(kept) <= 3 * 64 - 32
        assert sum(kept) <= 3 * 32 and stats.tokens_kept == sum(kept) / 3
