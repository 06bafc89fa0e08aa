"""What the cache tells of itself, and where its projections come from."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from kvswap_torch import ConfigError, KVSwapCache
from kvswap_torch.hf.families import model_parts
from kvswap_torch.projection import svd_keys
from kvswap_torch.projection_file import save_projections
from tests.python.tiny_models import COVERING, TIGHT, greedy, prompt, tiny_model

NATIVE_AT_LEAST = [
    "native",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("reference", "host device")),
]


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.mark.parametrize("sessions", NATIVE_AT_LEAST, indirect=True)
@torch.inference_mode()
def test_without_config_and_budget_a_long_first_pass_doubles_the_groups(sessions, tmp_path):
    """Half as long again is what a cache is ready for, and more than 6,144 tokens are many."""
    model = tiny_model("llama", max_position_embeddings=8192)
    for tokens, groups in ((4096, 100), (4097, 200)):
        with KVSwapCache(model, path=tmp_path) as cache:
            before = cache.driver.session
            assert cache.driver.config.groups_max == 100, "as for any length until it is known"
            model(**prompt(1, tokens), past_key_values=cache, logits_to_keep=1)
            assert cache.driver.config.groups_max == groups
            assert (cache.driver.session is before) == (groups == 100)


def test_numbers_and_table(llama, open_cache, sessions, monkeypatch):
    cache = open_cache(llama, TIGHT)
    empty = cache.stats()
    assert empty.tokens == empty.decoded == 0 and empty.hit_rate is None
    greedy(llama, prompt(2, 30), cache, tokens=6)
    stats = cache.stats()
    assert (stats.tokens, stats.batch, stats.decoded) == (35, 2, 10)
    assert stats.groups_per_step == 3
    assert stats.kv_bytes_full == 2 * 3 * 2 * 16 * 4 * 35 * 2
    assert stats.resident_bytes == sum(stats.ledger.values()) <= stats.resident_bytes_peak
    assert stats["batch"] == 2 and stats.as_dict()["counters"]["steps"] == 15
    json.dumps(stats.as_dict())
    if sessions == "native":
        assert stats.bytes_read_per_token > 0 and stats.bytes_written_per_token > 0
        assert 0 <= stats.hit_rate < 1 and stats.kv_bytes_on_disk > 0
        assert stats.reader in ("uring", "threads", "sync")
    words = ("35 x 2", "hit rate", "not calibrated", "KV on disk", "groups per step")
    assert [each for each in words if each not in str(stats)] == []
    monkeypatch.setitem(sys.modules, "rich.table", None)
    plain = str(stats).splitlines()
    assert plain[0] == "KVSwapCache" and plain[1].startswith("tokens ")
    assert [each for each in words if not any(each in line for line in plain)] == []


def test_no_projection_while_everything_is_attended(llama, open_cache):
    cache = open_cache(llama)
    greedy(llama, prompt(1, 40), cache)
    assert cache.stats().projection == "none needed so far"
    assert cache.stats().estimate_seconds == 0


def test_projection_estimated_from_the_prefill(llama, open_cache):
    cache = open_cache(llama, TIGHT)
    greedy(llama, prompt(1, 40), cache, tokens=3)
    assert "query_aware, not calibrated: rank doubled" in cache.stats().projection
    assert cache.driver.ranks == [16] * 3  # twice TIGHT's
    assert cache.stats().estimate_seconds > 0


def test_projection_estimated_while_decoding(llama, open_cache):
    """A short prompt outgrows the groups that may be attended: its keys alone are left."""
    cache = open_cache(llama, TIGHT)
    greedy(llama, prompt(2, 3), cache, tokens=20)
    assert "svd_keys" in cache.stats().projection


def test_each_text_has_its_own_projection(llama, open_cache):
    """After reset() the next text is estimated anew, and the same text gives the same answer."""
    cache = open_cache(llama, TIGHT)
    first = greedy(llama, prompt(1, 40), cache)
    cache.reset()
    greedy(llama, prompt(1, 40, seed=7), cache)
    seconds = cache.stats().estimate_seconds
    cache.reset()
    assert torch.equal(greedy(llama, prompt(1, 40), cache), first)
    assert cache.stats().estimate_seconds > seconds


def test_projection_file(llama, sessions, tmp_path):
    parts = model_parts(llama)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(100, parts.shape.width, generator=generator)
    pairs = [svd_keys(keys, 12)] * 3
    save_projections(tmp_path / "p.safetensors", pairs, kind="svd_keys", model=parts.identity)
    config = dataclasses.replace(TIGHT, projection_file="p.safetensors", model=parts.identity)
    config.save(tmp_path / "config.json")
    with KVSwapCache(llama, tmp_path, config=str(tmp_path / "config.json")) as cache:
        greedy(llama, prompt(1, 40), cache)
        assert cache.stats().projection == "file" and cache.driver.ranks == [8] * 3

    with pytest.raises(ConfigError, match=r"at least 16"):
        wide = dataclasses.replace(config, rank=16, source=tmp_path / "config.json")
        KVSwapCache(llama, tmp_path, config=wide)
    other = tiny_model("llama", num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"kv_heads 2 \(this model: 4\)"):
        KVSwapCache(other, tmp_path, config=tmp_path / "config.json")
    assert llama.config._attn_implementation == "sdpa"


def test_projection_file_under_a_budget_and_a_table(llama, sessions, tmp_path):
    """A solution or a budget may ask for fewer columns than the file has, and gets the first."""
    if sessions == "reference":
        pytest.skip("the reference keeps no ledger")
    parts = model_parts(llama)
    keys = torch.randn(100, parts.shape.width, generator=torch.Generator().manual_seed(0))
    save_projections(tmp_path / "p", [svd_keys(keys, 32)] * 3, kind="svd_keys")
    row = {"batch": 1, "context": 4096, "settings": {"rank": 32, "groups_max": 400,
                                                     "pages_max": 400}}  # fmt: skip
    config = dataclasses.replace(TIGHT, projection_file="p", table=(row,))
    config = config.save(tmp_path / "config.json")
    for arguments in ({}, {"max_context": 4096, "max_batch": 1}):
        budget = 1400 << 10
        with KVSwapCache(llama, tmp_path, config, kv_memory_bytes=budget, **arguments) as cache:
            greedy(llama, prompt(1, 40), cache)
            assert 8 <= cache.driver.ranks[0] < 32 and cache.stats().projection == "file"
            assert cache.stats().resident_bytes_peak <= budget


def test_int8_summary_and_wide_ranks(llama, open_cache, sessions):
    """Full-rank summaries choose alike in either precision, up to rounding."""
    if sessions == "reference":
        pytest.skip("the reference keeps its keys, no summary")
    config = dataclasses.replace(TIGHT, rank=16, groups_max=6, pages_max=12)
    outputs = []
    for dtype in ("model", "int8"):
        cache = open_cache(llama, dataclasses.replace(config, summary_dtype=dtype))
        outputs.append(greedy(llama, prompt(1, 40), cache))
    assert (outputs[0] == outputs[1]).float().mean() > 0.8


def test_look_ahead_hits(llama, open_cache, sessions):
    if sessions == "reference":
        pytest.skip("the reference has no pages")
    cache = open_cache(llama, COVERING)
    greedy(llama, prompt(1, 40), cache, tokens=10)
    assert cache.stats().hit_rate > 0.8  # every group is read once, then kept
