"""Indexed attention: the model's own index says which tokens are attended, of latents on disk."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from examples.plug_ins import MostSimilarKey
from kvswap_torch import (
    BudgetError,
    ConfigError,
    CorruptionError,
    KVSwapCache,
    SwapConfig,
    UnsupportedModelError,
)
from kvswap_torch.hf import indexed, key_probe
from tests.python import every_model
from tests.python.saved_conversation import swapped_three_ways
from tests.python.test_session import HEAD_DIM, KV_HEADS, Twins, options
from tests.python.tiny_models import COVERING, TIGHT, forward, greedy, has_native, prompt

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
# The second and third have layers that take an earlier layer's choice.
FAMILIES = ("DeepseekV32", "GlmMoeDsa", "HYV4", "AXK2")
TOPK = 8  # tokens that a query attends


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return every_model.build("DeepseekV32")


@pytest.mark.parametrize("tokens", [5, 61], ids=["all chosen", "few chosen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_tokens_at_any_length(family, tokens, tmp_path):
    """No covering budget is needed: what is read is what the model itself attends."""
    model, inputs = every_model.build(family), prompt(2, tokens, padding=(0, 3))
    assert model.config.index_topk == TOPK
    with KVSwapCache(model, tmp_path, TIGHT) as cache:
        actual = greedy(model, inputs, cache, tokens=24)
        stats = cache.stats()
    assert torch.equal(actual, greedy(model, inputs, tokens=24))
    if tokens > 5:
        assert 0 < stats.groups_per_step <= TOPK, "more groups than there are chosen tokens"


@pytest.mark.slow
def test_equal_tokens_after_4096(tmp_path):
    """A prefill over two blocks of the past, of which each query attends a sixteenth at the end."""
    sizes = {"num_hidden_layers": 2, "index_topk": 256, "max_position_embeddings": 8192}
    model, inputs = every_model.build("DeepseekV32", **sizes), prompt(1, 4096)
    with KVSwapCache(model, tmp_path, TIGHT) as cache:
        actual = greedy(model, inputs, cache, tokens=16)
        stats = cache.stats()
    assert torch.equal(actual, greedy(model, inputs, tokens=16))
    assert len(set(actual[0, 4096:].tolist())) > 3, "a token repeated shows nothing"
    assert 200 < stats.groups_per_step <= 256 and stats.bytes_read > 0


def test_logits_of_turns_and_crops(deepseek, tmp_path):
    """In the same passes: an index has many scores of zero, among which torch chooses by shapes."""
    ids, plain = prompt(2, 60)["input_ids"], DynamicCache(config=deepseek.config)
    with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
        begin = 0
        for tokens in (20, 17, 3, 1, 1, -5, 1, 18, 1):
            begin += min(0, tokens)
            if tokens < 0:
                cache.crop(tokens)
                plain.crop(tokens)
                continue
            new = ids[:, begin : begin + tokens]
            actual, expected = forward(deepseek, new, cache), forward(deepseek, new, plain)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            begin += tokens


def test_past_in_blocks(deepseek, tmp_path, monkeypatch):
    """A past of many blocks, and fewer rows at a time than a chunk has."""
    monkeypatch.setattr(indexed, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(indexed, "SCORES_MAX", 8 * 4 * 2 * 5)
    inputs = prompt(2, 45, padding=(0, 11))
    with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
        actual = forward(
            deepseek, inputs["input_ids"], cache, attention_mask=inputs["attention_mask"]
        )
    expected = forward(deepseek, inputs["input_ids"], None, attention_mask=inputs["attention_mask"])
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(actual[valid], expected[valid], rtol=1e-4, atol=1e-5)


def test_selected_repeated_and_reset(deepseek, tmp_path):
    inputs = prompt(3, 35, padding=(0, 4, 2))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    plain = DynamicCache(config=deepseek.config)
    with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
        for each in (plain, cache):
            forward(deepseek, ids, each, attention_mask=mask)
            each.batch_select_indices(torch.tensor([2, 0]))
            each.batch_repeat_interleave(2)
            each.reorder_cache(torch.tensor([3, 1, 0, 0]))
        order = torch.tensor([0, 2, 2, 2])
        step = {"attention_mask": nn.functional.pad(mask[order], (0, 1), value=1)}
        expected = forward(deepseek, ids[order, :1], plain, **step)
        actual = forward(deepseek, ids[order, :1], cache, **step)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        cache.reset()
        again = forward(deepseek, ids[:1, :20], cache)
        torch.testing.assert_close(again, forward(deepseek, ids[:1, :20], None))


def test_to_and_from_a_cache_in_memory(deepseek, tmp_path):
    ids, step = prompt(2, 33)["input_ids"], prompt(2, 1, seed=4)["input_ids"]
    plain = DynamicCache(config=deepseek.config)
    forward(deepseek, ids, plain)
    with KVSwapCache.from_cache(deepseek, plain, tmp_path, config=TIGHT) as cache:
        memory = cache.to_dynamic()
        for ours, theirs in zip(memory.layers, plain.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
            assert torch.equal(ours.indexer_keys, theirs.indexer_keys)
        expected = forward(deepseek, step, plain)
        for each in (cache, memory):
            actual = forward(deepseek, step, each)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_forked_reordered_and_reset(family, tmp_path):
    """Keys of the index go where the latents go: on from there, as a cache in memory does."""
    model, inputs = every_model.build(family), prompt(2, 44, padding=(0, 5))
    follow = prompt(2, 9, seed=3)["input_ids"]
    mask = nn.functional.pad(inputs["attention_mask"], (0, 9), value=1)
    plain = DynamicCache(config=model.config)
    forward(model, inputs["input_ids"], plain, attention_mask=inputs["attention_mask"])
    plain.reorder_cache(torch.tensor([1, 0]))
    expected = forward(model, follow, plain, attention_mask=mask[[1, 0]])
    answer, _ = swapped_three_ways(model, tmp_path)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(family, tmp_path):
    model, inputs = every_model.build(family), prompt(2, 33, padding=(0, 4))
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    expected = model.generate(**inputs, **options)
    with KVSwapCache(model, tmp_path, TIGHT) as cache:
        actual = model.generate(**inputs, **options, **cache.as_argument())
    assert torch.equal(actual, expected)


def test_a_fork_goes_its_own_way(deepseek, tmp_path):
    """New tokens of one do not reach the other's index."""
    ids, plain = prompt(1, 40)["input_ids"], DynamicCache(config=deepseek.config)
    with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
        for each in (plain, cache):
            forward(deepseek, ids[:, :30], each)
        with cache.fork() as fork:
            forward(deepseek, ids[:, 30:38].flip(1), fork)
            fork.crop(-3)
            assert [layer.index_keys.get_seq_length() for layer in fork.layers] == [35] * 4
            actual = forward(deepseek, ids[:, 30:], cache)
    expected = forward(deepseek, ids[:, 30:], plain)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_saved_cache_of_another_index_is_refused(deepseek, tmp_path):
    ids = prompt(1, 40)["input_ids"]
    with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
        forward(deepseek, ids, cache)
        cache.save(tmp_path / "saved")
    other = copy.deepcopy(deepseek)
    with torch.no_grad():
        other.model.layers[1].self_attn.indexer.wk.weight.neg_()[1::2].neg_()
    with pytest.raises(ConfigError, match="weights is not .*indexer.wk.weight"):
        KVSwapCache.open(other, tmp_path / "saved", path=tmp_path)
    with (
        KVSwapCache.open(other, tmp_path / "saved", path=tmp_path, probe=False) as cache,
        pytest.raises(ConfigError, match="keys of the index .* in layer 1"),
    ):
        key_probe.probe(cache, ids, None)


def test_a_saved_cache_without_its_index_is_refused(deepseek, tmp_path, monkeypatch):
    """A layer that chooses must have keys of the index, of all tokens."""
    ids = prompt(1, 40)["input_ids"]
    for lost in (lambda layer: layer.index_keys.crop(-1), lambda layer: layer.index_keys.reset()):
        with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
            forward(deepseek, ids, cache)
            lost(cache.layers[2])
            cache.save(tmp_path / "saved", overwrite=True)
        with pytest.raises(CorruptionError, match="must hold this model's layers"):
            KVSwapCache.open(deepseek, tmp_path / "saved", path=tmp_path)


def test_a_saved_index_is_in_the_budget(deepseek, tmp_path):
    with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
        forward(deepseek, prompt(1, 40)["input_ids"], cache)
        cache.save(tmp_path / "saved")
    limits = {"max_context": 4096, "max_batch": 1, "path": tmp_path}
    saved = tmp_path / "saved"
    with pytest.raises(BudgetError) as refused:
        KVSwapCache.open(deepseek, saved, kv_memory_bytes=100_000, **limits)
    index = 4096 * 4 * deepseek.config.index_head_dim * 4
    with pytest.raises(BudgetError):
        KVSwapCache.open(deepseek, saved, kv_memory_bytes=index, **limits)
    assert "at least" in str(refused.value)


class Stop(Exception):
    pass


def test_a_failed_pass_is_taken_back(deepseek, tmp_path):
    """Layers that have run keep neither latents nor keys of the index."""
    model, ids = copy.deepcopy(deepseek), prompt(1, 31)["input_ids"]

    def stop(*arguments: Any) -> None:
        raise Stop

    with KVSwapCache(model, tmp_path, TIGHT) as cache:
        forward(model, ids[:, :30], cache)
        handle = model.model.layers[2].mlp.register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            forward(model, ids[:, 30:], cache)
        handle.remove()
        actual = forward(model, ids[:, 30:], cache)
        assert {layer.index_keys.get_seq_length() for layer in cache.layers} == {31}
    expected = forward(model, ids, None)[:, 30:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_index_is_in_the_budget(deepseek, tmp_path):
    arguments = {"kv_memory_bytes": "4MiB", "max_context": 256, "max_batch": 1}
    with KVSwapCache(deepseek, tmp_path, **arguments) as cache:
        forward(deepseek, prompt(1, 40)["input_ids"], cache)
        width = 4 * deepseek.config.index_head_dim * 4  # layers and bytes
        assert cache.driver.bytes_beside()["index"] == 40 * width


# What is refused, by name.


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"keeper": "observed", "keep_tokens": 8}, "retention: must be left out, since the index"),
        ({"exact_layers": (0,)}, "selection.dense_layers: must be left out"),
        ({"heads": "each", "score": "max"}, "selection.heads: must be joint"),
    ],
)
def test_settings_that_are_refused(changes, why, deepseek, tmp_path):
    with pytest.raises(ConfigError, match=why):
        KVSwapCache(deepseek, tmp_path, dataclasses.replace(COVERING, **changes))


def test_plug_ins_are_refused(deepseek, tmp_path):
    config = SwapConfig(summary={"kind": "user"})
    with pytest.raises(ConfigError, match="must be left out, since the index of Deepseek"):
        KVSwapCache(deepseek, tmp_path, config, group_scores=MostSimilarKey())


def test_a_budget_too_small_for_what_is_chosen(deepseek, tmp_path):
    scores = [[0, 9, 17, 18], [4]]
    config = SwapConfig(summary={"kind": "user"}, selection={"top_k_groups": 3, "group_tokens": 4})
    told = indexed.group_scores(scores, 5, config)
    assert (told == 0).nonzero()[:, [0, 2]].tolist() == [[0, 0], [0, 2], [0, 4], [1, 1]]
    with pytest.raises(BudgetError, match="at least the 4 groups"):
        indexed.group_scores([[0, 4, 9, 17]], 5, config)


def test_an_attention_that_does_not_say_what_it_attends(deepseek):
    layer = deepseek.model.layers[0].self_attn
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match="must say which tokens it attends"):
        indexed.check_choice(layer, mask, None)
    with pytest.raises(UnsupportedModelError, match="of bools, got .* torch.float32"):
        indexed.check_choice(layer, mask.float(), torch.zeros(1, 2, 1))


# The session's part.


def test_a_step_sees_the_tokens_it_was_given(tmp_path):
    """Of sinks, chosen groups and the tail, the given tokens alone; the next step all again."""
    twins = Twins(options(tmp_path, rows="given", pages_max=40, groups_max=40))
    session = twins.sessions[0]
    session.begin_pass("prefill")
    keys, values = (twins.random(2, KV_HEADS, 60, HEAD_DIM) for _ in range(2))
    for layer in range(2):
        session.append(layer, keys, values)
    given = [[0, 3, 17, 18, 40, 59], [1, 58, 60]]
    step_keys, step_values = (twins.random(2, KV_HEADS, 1, HEAD_DIM) for _ in range(2))
    query = twins.random(2, 4, 1, HEAD_DIM)
    session.begin_pass("decode")
    session.append(0, step_keys, step_values)
    if session.needs_scores(0, 1):
        session.give_scores(0, torch.zeros(2, 1, session.positions(0) // 4 - 2))
    session.give_tokens(0, given)
    actual = session.attend(0, query, 0.2)
    all_keys, all_values = (
        torch.cat(pair, 2).repeat_interleave(2, 1)
        for pair in ((keys, step_keys), (values, step_values))
    )
    for sequence, own in enumerate(given):
        weights = (query[sequence] @ all_keys[sequence, :, own].transpose(1, 2) * 0.2).softmax(-1)
        expected = (weights @ all_values[sequence, :, own]).transpose(0, 1)
        torch.testing.assert_close(actual[sequence], expected, rtol=2e-5, atol=2e-5)
    session.append(1, step_keys, step_values)
    whole = session.attend(1, query, 0.2)
    expected = (query @ all_keys.transpose(2, 3) * 0.2).softmax(-1) @ all_values
    torch.testing.assert_close(whole, expected.transpose(1, 2), rtol=2e-5, atol=2e-5)


def test_given_tokens_that_are_refused(tmp_path):
    twins = Twins(options(tmp_path, rows="given", exact_layers=[1]))
    session = twins.sessions[0]
    session.begin_pass("prefill")
    for layer in range(2):
        session.append(layer, *(twins.random(2, KV_HEADS, 40, HEAD_DIM) for _ in range(2)))
    for layer, positions, why in (
        (0, [[1]], "for each of 2 sequences, got 1"),
        (0, [[1], [40]], "must lie in 0..39"),
        (0, [[1], [-1]], "must lie in 0..39"),
        (1, [[1], [1]], "layer 1 must choose groups of tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            session.give_tokens(layer, positions)
