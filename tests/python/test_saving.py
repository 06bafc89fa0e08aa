"""Saved caches and forks answer as the cache they were made of, in this process and another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import (
    BudgetError,
    ConfigError,
    CorruptionError,
    KVSwapCache,
    KVSwapError,
    SwapConfig,
)
from kvswap_torch.errors import StorageError
from tests.python import every_model
from tests.python.saved_child import OtherProcess
from tests.python.saved_conversation import filled, goes_on
from tests.python.tiny_models import (
    COVERING,
    FAMILIES,
    TIGHT,
    ctrl_c,
    forward,
    greedy,
    has_native,
    least_named,
    prompt,
    tiny_model,
)

if has_native():
    from kvswap_torch import _C
pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


def test_another_process_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Every family, selecting and not, with batch and padding."""
    saves = []
    with OtherProcess() as other:
        for number, family in enumerate(FAMILIES):
            for config in (TIGHT, COVERING):
                padding = (0, 7) if number % 2 else ()
                model = tiny_model(family)
                cache, out = filled(model, tmp_path, config, len(padding) or 1, padding=padding)
                saves.append(tmp_path / f"{len(saves)}.kvswap")
                with cache:
                    cache.save(saves[-1])
                    other.send(family, saves[-1], tmp_path, out, padding)
                    expected = goes_on(model, cache, out, padding)
                said = other.receive()
                assert said["probe"].startswith("passed")
                assert said["ids"] == out[:, :-1].tolist()
                assert said["tokens"] == expected
    assert sorted(tmp_path.iterdir()) == sorted(saves)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"tokens": 40}],
    ids=["beams", "assisted", "long"],
)
@pytest.mark.parametrize("config", [TIGHT, COVERING], ids=["tight", "covering"])
def test_beams_and_assisted_decoding_go_on_from_a_saved_cache(
    config: SwapConfig, options: dict, tmp_path: Path
) -> None:
    def more(model, cache, out) -> list[list[int]]:
        cache.batch_repeat_interleave(options.get("num_beams", 1))
        return goes_on(model, cache, out, **options)

    model = tiny_model("llama")
    cache, out = filled(model, tmp_path, config, tokens=60)
    with cache:
        cache.save(tmp_path / "a")
        fork = cache.fork()
        expected = more(model, cache, out)
    with fork:
        assert more(model, fork, out) == expected
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        assert more(model, opened, out) == expected
        opened.save(tmp_path / "b")
        _C.SavedCache(str(tmp_path / "b")).verify()
    if config is COVERING:
        memory = DynamicCache(config=model.config)
        greedy(model, prompt(1, 60), memory, tokens=4)
        assert more(model, memory, out) == expected


def test_two_processes_ask_at_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    saved = tmp_path / "a"
    cache, out = filled(model, tmp_path)
    with cache:
        cache.save(saved)
        expected = goes_on(model, cache, out)
    with OtherProcess() as one, OtherProcess() as two:
        for each in (one, two):
            each.send("llama", saved, tmp_path, out, waits=True)
        assert [one.receive(), two.receive()] == ["open", "open"]
        with pytest.raises(StorageError, match="is open"):
            _C.SavedCache.remove(str(saved))
        for each in (one, two):
            each.go()
        assert [each.receive()["tokens"] for each in (one, two)] == [expected] * 2
    _C.SavedCache.remove(str(saved))
    assert list(tmp_path.iterdir()) == []


def test_forks_go_their_own_ways(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    cache, out = filled(model, tmp_path)
    first = cache.fork()
    second = first.fork()
    expected = goes_on(model, cache, out)
    cache.close()
    assert goes_on(model, first, out) == expected
    first.close()
    third = second.fork()
    ids = prompt(1, 5, seed=4)["input_ids"]
    logits = forward(model, ids, second)
    assert second.get_seq_length() == out.shape[1] - 1 + 5
    second.close()
    assert torch.equal(forward(model, ids, third), logits)
    third.close()
    assert list(tmp_path.iterdir()) == []


def test_a_saved_cache_can_be_cropped_repeated_and_saved_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, _ = filled(model, tmp_path, tokens=60)
    cache.save(tmp_path / "a")
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        for each in (cache, opened):
            each.crop(-30)
            each.batch_repeat_interleave(2)
        ids = prompt(2, 20, seed=3)["input_ids"]
        assert torch.equal(forward(model, ids, cache), forward(model, ids, opened))
        opened.save(tmp_path / "b")
        with KVSwapCache.open(model, tmp_path / "b", path=tmp_path) as again:
            assert torch.equal(again.token_ids, cache.token_ids)
            ids = prompt(2, 3, seed=5)["input_ids"]
            assert torch.equal(forward(model, ids, cache), forward(model, ids, again))
    cache.close()


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, out = filled(model, tmp_path)
    saved = tmp_path / "a"
    cache.save(saved)
    cache.close()

    def refused(other, words: str, **arguments) -> None:
        with pytest.raises(ConfigError, match=words):
            KVSwapCache.open(other, saved, path=tmp_path, **arguments)

    refused(tiny_model("qwen3"), "made by model_type llama")
    refused(tiny_model("llama", dtype=torch.bfloat16), "dtype float32")
    turned = {"rope_type": "default", "rope_theta": 999.0}
    refused(tiny_model("llama", rope_parameters=turned), "rotary parameters")
    scaled = tiny_model("llama")
    with torch.no_grad():
        scaled.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    refused(scaled, "its weights is not .*layers.1.self_attn.k_proj.weight")
    with KVSwapCache.open(scaled, saved, path=tmp_path, probe=False) as opened:
        assert "probe=False" in opened.stats().probe
    other = out.clone()
    other[0, 9] = 96 - other[0, 9]
    refused(model, "token 9 of sequence 0", input_ids=other)
    with KVSwapCache.open(model, saved, path=tmp_path, input_ids=out[0, :20]):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_bad_input_has_its_sentence(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with KVSwapCache(model, path=tmp_path, config=TIGHT) as cache:
        with pytest.raises(KVSwapError, match="is empty"):
            cache.save(tmp_path / "a")
        with pytest.raises(KVSwapError, match="is empty"):
            cache.fork()
        embeds = torch.randn(1, 40, model.config.hidden_size)
        with torch.no_grad():
            model(inputs_embeds=embeds, past_key_values=cache)
        assert cache.token_ids is None
        cache.save(tmp_path / "a")
        with pytest.raises(StorageError, match="must not exist"):
            cache.save(tmp_path / "a")
        cache.save(tmp_path / "a", overwrite=True)
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        assert "embeddings" in opened.stats().probe
    with pytest.raises(StorageError, match="folder of a saved cache"):
        KVSwapCache.open(model, tmp_path / "none", path=tmp_path)
    with pytest.raises(BudgetError, match="kv_memory_bytes"):
        KVSwapCache.open(model, tmp_path / "a", path=tmp_path, kv_memory_bytes=4096)
    os.chmod(tmp_path / "a", 0o755)
    with pytest.warns(RuntimeWarning, match="others than its owner"):
        KVSwapCache.open(model, tmp_path / "a", path=tmp_path).close()
    os.chmod(tmp_path / "a", 0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "a" / "records.bin", 65534, -1)
        with pytest.warns(RuntimeWarning, match="belongs to another user"):
            KVSwapCache.open(model, tmp_path / "a", path=tmp_path).close()
    for use in (lambda: cache.save(tmp_path / "b"), cache.fork):
        with pytest.raises(KVSwapError, match="closed"):
            use()
    os.truncate(tmp_path / "a" / "state.safetensors", 500)
    with pytest.raises(CorruptionError, match="state.safetensors"):
        KVSwapCache.open(model, tmp_path / "a", path=tmp_path)


@pytest.mark.parametrize("family", ["llama", "gemma3", "Qwen3Next"])
def test_a_pass_that_was_interrupted_is_neither_saved_nor_forked(
    family: str, tmp_path: Path
) -> None:
    """It is taken back; where a recurrent layer's state has changed, that cannot be."""
    model = every_model.build(family) if family == "Qwen3Next" else tiny_model(family)
    cache, out = filled(model, tmp_path)
    with cache:
        with ctrl_c(model.model.layers[1], after=True):
            forward(model, prompt(1, 9)["input_ids"], cache)
        if family == "Qwen3Next":
            for use in (lambda: cache.save(tmp_path / "a"), cache.fork):
                with pytest.raises(KVSwapError, match="interrupted"):
                    use()
            assert list(tmp_path.iterdir()) == []
            return
        cache.save(tmp_path / "a")
        with cache.fork() as fork:
            expected = goes_on(model, fork, out)
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        assert torch.equal(opened.token_ids, out[:, :-1])
        assert goes_on(model, opened, out) == expected


def test_opening_reads_the_probes_groups_alone_and_changes_nothing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, out = filled(model, tmp_path, tokens=400)
    cache.save(tmp_path / "a")
    cache.close()

    def content() -> list:
        places = [tmp_path / "a", *sorted((tmp_path / "a").iterdir())]
        kept = [(at.name, at.stat().st_mode, at.stat().st_mtime_ns) for at in places]
        return kept + [at.read_bytes() for at in places[1:]]

    before = content()
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path, probe=False) as opened:
        assert opened.stats().bytes_read == 0
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        counters = opened.stats().counters
        groups = 16 // TIGHT.group_tokens
        assert counters["records_read"] == groups * len(opened.parts.disk)
        goes_on(model, opened, out)
        opened.crop(-300)
        forward(model, prompt(1, 20)["input_ids"], opened)
    assert content() == before


def test_opened_with_little_memory_there_is_room_to_go_on(tmp_path: Path) -> None:
    """For half as many tokens again, and for a timeline, before there are pages for reuse."""
    model, ids = tiny_model("llama"), prompt(1, 251)["input_ids"]
    with KVSwapCache(model, tmp_path) as cache:
        forward(model, ids, cache)
        cache.save(tmp_path / "saved")

    def opened(**limits):
        return KVSwapCache.open(model, tmp_path / "saved", path=tmp_path, **limits)

    with pytest.raises(BudgetError) as refused:
        opened(kv_memory_bytes=1, max_context=1700)
    budget = least_named(refused.value)
    with opened(kv_memory_bytes=budget) as cache:
        forward(model, ids, cache)
        assert cache.get_seq_length() == 502
    with opened(kv_memory_bytes=budget + 60_000, max_context=1700, timeline_spans=1000) as cache:
        assert cache.stats().resident_bytes_peak <= budget + 60_000
