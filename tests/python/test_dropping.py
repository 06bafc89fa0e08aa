"""Presets that drop tokens, without a path: no file, no disk, and only what they keep in memory."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvswap_torch
from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from kvswap_torch.errors import KVSwapError
from kvswap_torch.keep import drops, drops_for_good
from kvswap_torch.preset.definition import Shape
from tests.python.test_cli import generate
from tests.python.test_presets_generate import (
    BEAMS,
    GQA,
    answers_of,
    assistant,
    half_model,
    hybrid_model,
    model_of,
    plain_answers,
    small,
)
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
PRESETS = {p.name: SwapConfig.preset(p.name, **p.shown(Shape())) for p in kvswap_torch.presets()}
NAMES = [name for name, config in PRESETS.items() if drops_for_good(config)]


def few(name: str, model, **changes) -> SwapConfig:
    """Attends some 12 tokens of those beside the tail."""
    config = small(name, model, 2)
    kept = {} if config.keeper == "newest" else {"keep_tokens": 12}
    kept |= {"keep_layer_least": 3} if config.keep_layer_shares else {}
    return dataclasses.replace(config, **kept | changes)


def test_these_are_they():
    assert {*NAMES, "snapkv+"} == {name for name, config in PRESETS.items() if drops(config)}
    assert {"snapkv", "h2o", "tova", "arkv", "streaming", "window"} <= set(NAMES)


@pytest.mark.parametrize("ratio", list(GQA))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.pairs(once=["name", "ratio"])
def test_what_fits_is_the_full_caches(name, ratio):
    model = model_of(ratio)
    with KVSwapCache(model, config=small(name, model, 200)) as cache:
        for ours, theirs in zip(answers_of(model, cache), plain_answers(ratio), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("ratio", list(GQA))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.pairs(once=["name", "ratio"])
def test_one_turn_is_as_with_a_path(name, ratio, tmp_path):
    """Left padding and beams, and nothing of it on a disk."""
    model = model_of(ratio)
    config = few(name, model)
    inputs = prompt(3, 90, padding=(0, 7, 3))
    beams = prompt(2, 80, padding=(3, 0))
    with KVSwapCache(model, config=config) as cache, KVSwapCache(model, tmp_path, config) as other:
        assert torch.equal(greedy(model, inputs, cache, 30), greedy(model, inputs, other, 30))
        ours, theirs = cache.stats(), other.stats()
        assert ours.tokens_dropped == theirs.tokens_dropped > 40
        assert ours.tokens_kept == theirs.tokens_kept
        cache.reset()
        other.reset()
        assert torch.equal(
            greedy(model, beams, cache, **BEAMS), greedy(model, beams, other, **BEAMS)
        )
        stats = cache.stats()
    assert stats.bytes_read == stats.bytes_written == stats.kv_bytes_on_disk == 0
    assert theirs.bytes_written > 0
    assert (stats.reader, stats.io_mode) == ("memory", "none")


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_hybrids(name, tmp_path):
    for model in (half_model(), hybrid_model()):
        config, inputs = few(name, model), prompt(2, 70, padding=(0, 9))
        with KVSwapCache(model, config=config) as one, KVSwapCache(model, tmp_path, config) as two:
            assert torch.equal(greedy(model, inputs, one, 20), greedy(model, inputs, two, 20))


@pytest.mark.parametrize("name", NAMES)
def test_assisted_decoding_and_turns_go_on(name):
    """A second prompt attends what is left; who proposed too much takes that back."""
    model = model_of(2)
    with KVSwapCache(model, config=few(name, model)) as cache:
        out = greedy(model, prompt(1, 60), cache, tokens=12, assistant_model=assistant())
        for seed in (1, 2):
            ids = torch.cat([out, prompt(1, 40, seed=seed)["input_ids"]], 1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            out = greedy(model, inputs, cache, tokens=8)
            cache.crop(-5)
            out = out[:, :-5]
        assert cache.get_seq_length() == out.shape[1] - 1
        assert cache.stats().tokens_dropped > 60


def test_no_file_is_opened(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model, inputs = model_of(2), prompt(2, 90)
    greedy(model, inputs)  # what torch opens at first
    before = os.listdir("/proc/self/fd")
    threads = os.listdir("/proc/self/task")
    with KVSwapCache(model, preset="snapkv", keep=64) as cache:
        for _ in range(3):
            logits = model(**inputs, past_key_values=cache).logits
            assert os.listdir("/proc/self/fd") == before and logits.isfinite().all()
            cache.reset()
        assert os.listdir("/proc/self/task") == threads, "nobody waits for a disk"
        assert cache.stats().preset == "snapkv"
        assert "gone" in str(cache.stats())
    assert not list(tmp_path.iterdir())


def test_no_disk_is_needed(monkeypatch):
    """Of a budget in gigabytes nothing is asked of where the program runs."""
    model = model_of(2)
    with KVSwapCache(model, preset="streaming", keep=64, max_context=2**20, max_batch=1) as cache:
        greedy(model, prompt(1, 90), cache)
        assert cache.stats().kv_bytes_on_disk == 0


@pytest.mark.parametrize("name", NAMES)
def test_resident_bytes_are_what_is_kept(name):
    """A prompt ten times as long takes no more, but for tables of 20 bytes a group or so."""
    model = tiny_model("llama", max_position_embeddings=4096)
    config, stats = few(name, model), []
    for tokens in (300, 3000):
        with KVSwapCache(model, config=config) as cache, torch.no_grad():
            model(**prompt(1, tokens), past_key_values=cache, logits_to_keep=1)
            ids = prompt(1, 1)["input_ids"]
            model(ids, past_key_values=cache)
            stats.append(cache.stats())
    short, long = (each.ledger for each in stats)
    for use in ("pages", "kept", "staging"):
        assert long[use] == short[use], use
    full = stats[1].kv_bytes_full
    assert long["tables"] - short["tables"] < 0.5 * full
    assert stats[1].counters["bytes_allocated"] <= 8 * 65536  # of 2 MiB
    layer = full / 3  # of three: only one is ever there as a whole
    extra = stats[1].resident_bytes_peak - stats[1].resident_bytes
    assert 0.9 * layer < extra < 1.2 * layer


def test_what_is_gone_cannot_be_had_again(tmp_path):
    model = model_of(2)
    with KVSwapCache(model, config=few("snapkv", model)) as cache:
        ours = greedy(model, prompt(1, 90), cache, tokens=6)
        for ask in (lambda: cache.crop(-80), cache.to_dynamic):
            with pytest.raises(KVSwapError, match="dropped for good"):
                ask()
        with pytest.raises(ValueError, match="must have a directory"):
            cache.fork()
        with pytest.raises(ValueError, match="must have a directory"):
            cache.save(tmp_path / "saved")
        assert not list(tmp_path.iterdir())
        assert cache.get_seq_length() == 95, "nothing has changed"
        cache.crop(-5)
        again = greedy(model, {"input_ids": ours[:, :91]}, cache, tokens=5)
        assert again.shape == ours.shape
        cache.crop(-cache.get_seq_length())
        assert torch.equal(greedy(model, prompt(1, 90), cache, tokens=6), ours)


def test_a_cache_in_memory_goes_on_without_a_path():
    model = model_of(2)
    full = DynamicCache(config=model.config)
    greedy(model, prompt(1, 60), full, tokens=4)
    with KVSwapCache.from_cache(model, full, config=few("streaming", model)) as cache:
        for _ in range(5):
            model(prompt(1, 1)["input_ids"], past_key_values=cache)
        stats = cache.stats()
        assert cache.get_seq_length() == 68 and stats.tokens_dropped == 60
        assert stats.counters["bytes_allocated"] == 65536


def test_a_pass_that_fails_is_taken_back(monkeypatch):
    model = model_of(2)
    config = few("h2o", model)
    with KVSwapCache(model, config=config) as cache, KVSwapCache(model, config=config) as other:
        for tokens in (90, 1, 40, 1):
            ids = prompt(1, tokens)["input_ids"]
            layer = model.model.layers[2]
            with monkeypatch.context() as broken, torch.no_grad():
                broken.setattr(layer.mlp, "forward", _fail)
                with pytest.raises(OSError, match="on purpose"):
                    model(ids, past_key_values=cache)
            with torch.no_grad():
                ours = model(ids, past_key_values=cache).logits
                theirs = model(ids, past_key_values=other).logits
            torch.testing.assert_close(ours, theirs)


def _fail(*_):
    raise OSError("on purpose")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"path: must be given where every token is kept \(summary.kind=low_rank"),
        ({"preset": "quest"}, "path: must be given where every token is kept"),
        ({"preset": "exact"}, "summary.kind=none, retention.policy=none"),
        ({"preset": "snapkv+"}, "retention.refresh_scores: must be attended without a path"),
        ({"preset": "snapkv", "path": ""}, "path: must name a folder"),
        (
            {"config": SwapConfig.preset("snapkv", exact_layers=(0,))},
            r"selection.dense_layers: must be empty without a path, .* got \(0,\)",
        ),
        (
            {"config": SwapConfig.preset("snapkv", device_model="emmc")},
            "storage.simulated_device: must be left out without a path, since .*, got 'emmc'",
        ),
        (
            {"config": SwapConfig.preset("h2o", disk_quota_bytes=1 << 30)},
            "storage.max_disk_bytes: must be left out without a path",
        ),
    ],
)
def test_what_wants_a_path_says_so(arguments, message):
    with pytest.raises(ConfigError, match=message):
        KVSwapCache(model_of(2), **arguments)


def test_the_command_line_wants_none(monkeypatch, tmp_path):
    from kvswap_torch.cli.generate import GenerateOptions, _path

    def path(**said) -> Path | None:
        options = GenerateOptions(model="", document=None, questions=(), **said)
        return _path(options, said.get("config"))

    assert path(preset="snapkv") is None
    assert path(preset="snapkv", path=tmp_path) == tmp_path
    assert path(preset="streaming", save=tmp_path) == path(preset="quest") == path() == Path(".")
    assert path(preset="snapkv+") == Path(".")


@pytest.mark.parametrize(("preset", "keep"), [("streaming", "1.0"), ("snapkv", "100")])
def test_the_command_line_drops(preset, keep, tiny_model_dir, monkeypatch, tmp_path):
    document, out = tmp_path / "document.txt", tmp_path / "out.json"
    document.write_text("The colour of the house is blue, the number is nine. " * 6)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    done = generate(
        tiny_model_dir,
        document,
        "--preset",
        preset,
        "--keep",
        keep,
        "--compare",
        "--json",
        str(out),
    )
    assert done.exit_code == 0 and not list(folder.iterdir())
    result = json.loads(out.read_text())
    assert result["answers_equal"] or keep != "1.0"
    stats = result["disk"]["stats"]
    assert (stats["reader"], stats["preset"]) == ("memory", preset)
    assert (stats["tokens_dropped"] > 0) == (keep != "1.0")
    assert result["disk"]["prefill_tokens"] == result["document_tokens"]


def test_a_share_is_of_the_longest_text_where_no_context_is_given() -> None:
    model = tiny_model("llama")
    longest = model.config.max_position_embeddings
    with KVSwapCache(model, preset="snapkv", keep=0.5) as cache:
        alone = cache.driver.config
    with KVSwapCache(model, preset="snapkv", keep=0.5, max_context=longest) as cache:
        assert cache.driver.config == alone
