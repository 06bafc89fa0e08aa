"""``heads="each"``: every KV head chooses for itself, with records and pages of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import KVSwapCache
from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.projection import from_chunk, svd_keys
from kvswap_torch.projection_file import save_projections
from tests.python.test_hf_selection import conversation
from tests.python.tiny_models import COVERING, TIGHT, greedy, has_native, prompt, tiny_model

needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
EACH = dataclasses.replace(COVERING, heads="each")
TIGHT_EACH = dataclasses.replace(TIGHT, heads="each")
# Query heads of a KV head: 1, 2, 3 and 8.
GQA = {1: (4, 4), 2: (4, 2), 3: (6, 2), 8: (16, 2)}


@pytest.fixture(scope="module", params=list(GQA), ids=lambda ratio: f"gqa-{ratio}")
def model(request: pytest.FixtureRequest):
    heads, kv_heads = GQA[request.param]
    return tiny_model("qwen3", num_attention_heads=heads, num_key_value_heads=kv_heads)


def test_a_covering_budget_gives_the_full_caches_tokens(model, open_cache):
    inputs = prompt(3, 21, padding=(0, 7, 3))
    expected = greedy(model, inputs)
    assert torch.equal(greedy(model, inputs, open_cache(model, EACH)), expected)
    inputs = prompt(2, 18, padding=(3, 0))
    arguments = {"num_beams": 3, "num_return_sequences": 2, "tokens": 8}
    expected = greedy(model, inputs, **arguments)
    assert torch.equal(greedy(model, inputs, open_cache(model, EACH), **arguments), expected)


def test_turns_crops_and_long_chunks_are_the_full_caches(model, open_cache):
    cache, plain = open_cache(model, EACH), DynamicCache(config=model.config)
    ids = prompt(2, 18)["input_ids"]
    for turn, question in enumerate((1, 3, 12)):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = greedy(model, inputs, plain, tokens=5)
        assert torch.equal(greedy(model, inputs, cache, tokens=5), expected), turn
        for each in (cache, plain):
            each.crop(-3)
        ids = torch.cat([expected[:, :-2], prompt(2, question, seed=10 + turn)["input_ids"]], 1)


@needs_native
@pytest.mark.parametrize("look_ahead", [True, False], ids=["ahead", "true-query"])
@pytest.mark.parametrize("rows", [{}, {"rows": "box", "rank": 32}], ids=["low_rank", "box"])
@pytest.mark.pairs
def test_heads_choose_as_the_reference(model, rows, look_ahead, tmp_path, monkeypatch):
    config = dataclasses.replace(TIGHT_EACH, look_ahead=look_ahead, **rows)
    logits, chosen, stats = conversation(model, tmp_path, config, "native", monkeypatch)
    expected, _, _ = conversation(model, tmp_path, config, "reference", monkeypatch, chosen)
    torch.testing.assert_close(logits, expected)
    assert stats.bytes_read > 0 and 0 < stats.hit_rate < 1
    kv_heads = model.config.num_key_value_heads
    one_step = chosen[-1][-1]
    assert len(one_step) == 2 * kv_heads
    assert any(one_step[i] != one_step[i + 1] for i in range(0, len(one_step), kv_heads))
    assert stats.groups_per_step <= 6 * kv_heads


@needs_native
def test_half_precision_is_as_close_as_with_all_heads_together(tmp_path):
    model = tiny_model("llama", dtype=torch.bfloat16, head_dim=32)
    inputs = prompt(3, 24, padding=(0, 9, 2))
    logits = []
    for config in (COVERING, EACH):
        with torch.no_grad(), KVSwapCache(model, tmp_path, config) as cache:
            model(**inputs, past_key_values=cache)
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
            ids = inputs["input_ids"][:, :1]
            logits.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0.02, atol=0.02)


@needs_native
def test_a_budget_holds_and_covers_what_it_promises(tmp_path):
    model = tiny_model("llama", head_dim=64)
    budget = 1400 << 10
    config = dataclasses.replace(EACH, rank=16)
    inputs = prompt(2, 200, padding=(0, 5))
    with KVSwapCache(model, tmp_path, config, budget, max_context=220, max_batch=2) as cache:
        greedy(model, inputs, cache, tokens=12)
        stats = cache.stats()
        assert cache.driver.config.groups_max < 100, "the budget must be what limits"
        assert stats.resident_bytes_peak <= budget
        assert stats.ledger["pages"] > 0 and stats.ledger["summary"] > 0
        assert stats.decoded == 2 * 11
    with pytest.raises(Exception, match="max_batch"):
        KVSwapCache(model, tmp_path, config, 100 << 10, max_context=220, max_batch=2)


@needs_native
def test_an_estimated_projection_is_each_heads_own(tmp_path):
    keys, query = torch.randn(2, 2, 300, 16), torch.randn(2, 6, 300, 16)
    for kind in ("query_aware", "svd_keys"):
        pair = from_chunk(kind, keys, query, 4, heads="each")
        for head in range(2):
            own = keys[:, head : head + 1], query[:, 3 * head : 3 * head + 3]
            for side, expected in zip(pair, from_chunk(kind, *own, 4), strict=True):
                assert torch.equal(side[16 * head : 16 * head + 16], expected)


def test_what_cannot_be_is_refused_by_name(tmp_path):
    model = tiny_model("llama", head_dim=16)
    identity = model_parts(model).identity
    pairs = [svd_keys(torch.randn(40, 32), 8)] * 3
    save_projections(tmp_path / "all.st", pairs, kind="svd_keys", model=identity)
    config = dataclasses.replace(EACH, projection_file="all.st", source=tmp_path / "config.json")
    with pytest.raises(ConfigError, match="calibrated for selection.heads per_head, was for joint"):
        KVSwapCache(model, tmp_path, config)
    save_projections(tmp_path / "each.st", pairs, kind="svd_keys", model=identity, heads="each")
    with pytest.raises(ConfigError, match="calibrated for selection.heads joint, was for per_head"):
        KVSwapCache(
            model, tmp_path, dataclasses.replace(config, projection_file="each.st", heads="all")
        )
    with pytest.raises(ConfigError, match="rank: must be an int from 1 to 16"):
        KVSwapCache(model, tmp_path, dataclasses.replace(EACH, rank=32))


@needs_native
def test_records_that_are_not_aligned_are_refused_with_what_is(tmp_path):
    model = tiny_model("llama", head_dim=16)
    config = dataclasses.replace(EACH, group_tokens=1)  # 128 bytes a record of one head
    with pytest.raises(
        ValueError, match="with selection.heads per_head selection.group_tokens must be at least"
    ) as error:
        KVSwapCache(model, tmp_path, config)
    least = int(str(error.value).split("at least ")[1].split(",")[0])
    with pytest.raises(ValueError, match=f"at least {least}"):
        KVSwapCache(model, tmp_path, dataclasses.replace(config, group_tokens=least - 1))
    KVSwapCache(model, tmp_path, dataclasses.replace(config, group_tokens=least)).close()


@needs_native
def test_a_projection_file_of_each_head_is_used(tmp_path):
    model = tiny_model("llama", head_dim=16)
    identity = model_parts(model).identity
    shape = model_parts(model).shape
    pair = tuple(torch.cat([torch.eye(16)[:, :8]] * shape.kv_heads) for _ in range(2))
    save_projections(
        tmp_path / "each.st", [pair] * 3, kind="svd_keys", model=identity, heads="each"
    )
    config = dataclasses.replace(
        TIGHT_EACH, projection_file="each.st", source=tmp_path / "config.json"
    )
    with KVSwapCache(model, tmp_path, config) as cache:
        greedy(model, prompt(2, 40), cache)
        stats = cache.stats()
        assert stats.projection == "file"
        assert 0 < stats.hit_rate < 1
