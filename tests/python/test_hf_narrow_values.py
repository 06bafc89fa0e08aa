"""Models whose values are narrower than their keys: records as narrow, and the model's answers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.errors import ConfigError, CorruptionError
from kvswap_torch.hf import cache as cache_module
from kvswap_torch.hf import unloaded
from kvswap_torch.hf.families import ModelParts, model_parts
from kvswap_torch.hf.saved_checks import check_values
from kvswap_torch.hf.unloaded import plan_cache
from tests.python import every_model
from tests.python.narrow_llama import narrow_llama
from tests.python.saved_conversation import swapped_three_ways
from tests.python.tiny_models import COVERING, TIGHT, forward, greedy, has_native, prompt

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
MODELS: dict[str, Callable[[], Any]] = {
    "mimo": lambda: every_model.build("MiMoV2Flash"),
    "llama": narrow_llama,
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def padded(model: Any, *place: Any) -> ModelParts:
    """As versions before had it: records with zeros behind values."""
    return model_parts(model, *place).recorded(0)


def test_parts(model):
    parts = model_parts(model)
    assert 0 < parts.value_dim == parts.shape.value_dim < parts.shape.head_dim
    numbers = parts.shape.layers * parts.shape.kv_heads * (parts.shape.head_dim + parts.value_dim)
    assert parts.shape.kv_bytes(10) == parts.cached_bytes(1, 10) == 10 * numbers * 4


def test_on_a_device_values_are_padded(model, monkeypatch):
    parts = model_parts(model, torch.device("meta"))
    assert parts.shape.value_dim == 0 and parts.shape.value_width == parts.shape.head_dim
    values = torch.ones(1, parts.shape.kv_heads, 3, parts.value_dim)
    stored = parts.stored(values, values)[1]
    assert stored.shape[3] == parts.shape.head_dim and stored.sum() == values.sum()
    assert torch.equal(parts.cached(stored, stored)[1], values)


def test_a_saved_cache_has_values_that_the_model_and_the_device_can_take(model, monkeypatch):
    parts = model_parts(model)
    for width in (0, parts.value_dim, parts.shape.head_dim):
        check_values(width, parts, "book")
    with pytest.raises(CorruptionError, match=f"must have values of {parts.value_dim} numbers"):
        check_values(parts.value_dim - 8, parts, "book")
    parts = dataclasses.replace(parts, device=torch.device("meta"))
    check_values(parts.shape.head_dim, parts, "book")
    with pytest.raises(ConfigError, match="book has values .* with the model on the CPU"):
        check_values(parts.value_dim, parts, "book")


def test_groups_of_a_preset_fill_what_a_disk_reads_with_narrow_values():
    model = MODELS["mimo"]()
    parts = model_parts(model)
    shape = dataclasses.replace(parts.shape, kv_heads=4, head_dim=192, value_dim=128)
    identity = dataclasses.replace(parts.identity, head_dim=192, dtype="bfloat16")
    parts = dataclasses.replace(parts, shape=shape, identity=identity)
    config = Bytes(parts, 4096).preset("loki", {})
    assert config.selection.group_tokens == 4 and 4 * (192 + 128) * 2 >= 2048 > 3 * (192 + 128) * 2


@pytest.mark.parametrize("padding", [(), (0, 7, 3)], ids=["even", "left-padded"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}], ids=str)
def test_equal_tokens_while_all_fits(model, padding, arguments, tmp_path):
    inputs = prompt(3, 37, padding=padding)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        actual = greedy(model, inputs, cache, tokens=16, **arguments)
    assert torch.equal(actual, greedy(model, inputs, tokens=16, **arguments))


def test_logits_of_turns_and_crops(model, tmp_path):
    """A long chunk over what is on disk, a short one, single tokens, and one after a crop."""
    ids = prompt(2, 61)["input_ids"]
    steps = (20, 17, 3, 1, 1, -5, 1, 18)
    if model.config.model_type.startswith("mimo"):
        steps = tuple(each for each in steps if each > 0)  # its windows cannot go back
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        begin = 0
        for tokens in steps:
            if tokens < 0:
                cache.crop(tokens)
                begin += tokens
                continue
            actual = forward(model, ids[:, begin : begin + tokens], cache)
            begin += tokens
            expected = forward(model, ids[:, :begin], None)[:, -tokens:]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


WIDER = TIGHT.with_settings({"selection.group_tokens": 8})
CONFIGS = {
    "choosing": TIGHT,
    "each head": WIDER.with_settings({"selection.heads": "per_head"}),
    "e4m3": WIDER.with_settings({"storage.kv_dtype": "fp8_e4m3"}),
    "four bits": WIDER.with_settings({"storage.kv_dtype": "int4"}),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_are_those_of_padded_records(name, tmp_path, monkeypatch):
    """To the bit, where groups are chosen and records are rounded: by blocks of 32 in either."""
    model, inputs = narrow_llama(96, 32), prompt(2, 40, padding=(0, 5))
    follow = prompt(2, 6, seed=3)["input_ids"]
    answers, on_disk = [], []
    for parts in (model_parts, padded):
        monkeypatch.setattr(cache_module, "model_parts", parts)
        with KVSwapCache(model, tmp_path, CONFIGS[name]) as cache:
            mask = inputs["attention_mask"]
            forward(model, inputs["input_ids"], cache, attention_mask=mask)
            for i in range(follow.shape[1]):
                mask = nn.functional.pad(mask, (0, 1), value=1)
                answers.append(forward(model, follow[:, i : i + 1], cache, attention_mask=mask))
            on_disk.append(cache.stats().kv_bytes_on_disk)
    steps = follow.shape[1]
    assert torch.equal(torch.stack(answers[:steps]), torch.stack(answers[steps:]))
    assert 0 < on_disk[0] <= on_disk[1]


def test_saved_forked_and_reordered(model, tmp_path):
    _, opened = swapped_three_ways(model, tmp_path)
    assert opened.parts.shape.value_dim == opened.parts.value_dim


def test_what_was_saved_with_zeros_behind_is_opened(model, tmp_path, monkeypatch):
    """As versions before saved it: its records keep their zeros, and answers are the same."""
    ids, follow = prompt(2, 44)["input_ids"], prompt(2, 9, seed=3)["input_ids"]
    with monkeypatch.context() as before:
        before.setattr(cache_module, "model_parts", padded)
        with KVSwapCache(model, tmp_path, TIGHT) as cache:
            forward(model, ids, cache)
            cache.save(tmp_path / "saved")
            expected = forward(model, follow, cache)
    with KVSwapCache.open(model, tmp_path / "saved", path=tmp_path) as opened:
        assert opened.parts.shape.value_dim == 0 and "passed" in opened.driver.probe
        assert torch.equal(forward(model, follow, opened), expected)
        opened.save(tmp_path / "again")
    with KVSwapCache.open(model, tmp_path / "again", path=tmp_path) as again:
        assert again.get_seq_length() == 53 and "passed" in again.driver.probe


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_model(dtype, tmp_path):
    """The error against fp32 is at most twice that of the model's own attention."""
    half = narrow_llama(dtype=dtype)
    rounded = copy.deepcopy(half).float()  # the same weights
    ids = prompt(2, 60)["input_ids"]
    exact = forward(rounded, ids, None)
    usual, config = DynamicCache(config=half.config), dataclasses.replace(COVERING, group_tokens=4)
    with KVSwapCache(half, tmp_path, config) as cache:
        errors = []
        for each in (usual, cache):
            forward(half, ids[:, :50], each)
            step = [forward(half, ids[:, i : i + 1], each) for i in range(50, 60)]
            errors.append((torch.cat(step, 1).float() - exact[:, 50:]).norm())
    assert errors[1] <= 2 * errors[0]


def test_fit_counts_what_values_take(tmp_path, monkeypatch):
    """`kvswap fit` and the budget count records and pages as they are."""
    model, sizes = narrow_llama(), []
    config = SwapConfig().with_settings({"selection.group_tokens": 64})
    for parts in (model_parts, padded):
        monkeypatch.setattr(unloaded, "model_parts", parts)
        sizes.append(plan_cache(model, tmp_path, config, max_context=400, max_batch=1))
    narrow, wide = sizes
    assert 4 * narrow.disk_bytes == 3 * wide.disk_bytes
    assert 4 * narrow.uses["pages"] == 3 * wide.uses["pages"]
    assert narrow.full_bytes == wide.full_bytes
