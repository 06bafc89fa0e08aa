"""Latent attention (MLA): latents on disk, attended as they lie by a query that took W_UK in."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

from kvswap_torch import ConfigError, KVSwapCache, SwapConfig, UnsupportedModelError
from kvswap_torch.hf import families
from kvswap_torch.hf.driver import SessionDriver
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.latent import Latent
from kvswap_torch.preset import PRESETS
from kvswap_torch.tuning.observe import Calibrator
from tests.python import every_model
from tests.python.saved_conversation import swapped_three_ways
from tests.python.test_hf_selection import conversation
from tests.python.tiny_models import COVERING, SMALL, TIGHT, forward, greedy, has_native, prompt
from tests.selections import assert_same_choice

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
# Rotary channels in halves and interleaved, as complex numbers, and none; queries through a latent
# of their own and not; scaled by positions; beside recurrent layers.
KNOWN = ("DeepseekV2", "DeepseekV3", "Mistral4", "MiniCPM3", "KimiLinear", "BailingHybrid")
FAMILIES = [name for name in KNOWN if hasattr(transformers, f"{name}ForCausalLM")]
RANK, ROTARY, HEADS = 56, 8, 4


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return every_model.build("DeepseekV3")


def test_parts(deepseek):
    parts = model_parts(deepseek)
    assert parts.disk == (0, 1, 2, 3)
    assert (parts.shape.heads, parts.shape.kv_heads, parts.shape.sides) == (HEADS, 1, 1)
    assert parts.shape.head_dim == parts.identity.head_dim == RANK + ROTARY
    assert parts.latent.query_dim == 16 and parts.latent.value == 16


def test_a_token_is_one_latent_and_one_rotated_key(deepseek, tmp_path):
    with KVSwapCache(deepseek, tmp_path, TIGHT) as cache:
        forward(deepseek, prompt(2, 40)["input_ids"], cache)
        stats = cache.stats()
        assert stats.kv_bytes_full == 2 * 40 * 4 * (RANK + ROTARY) * 4
        assert stats.kv_bytes_on_disk == 2 * 36 * 4 * (RANK + ROTARY) * 4  # all but the newest four
        keys, values = cache.layers[0].keys, cache.layers[0].values
        assert (*keys.shape, values.shape[3]) == (2, 1, 40, RANK, ROTARY)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_tokens_while_all_fits(family, tmp_path):
    model, inputs = every_model.build(family), prompt(2, 37, padding=(0, 9))
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        actual = greedy(model, inputs, cache, tokens=16)
    assert torch.equal(actual, greedy(model, inputs, tokens=16))


def test_logits_of_turns_and_crops(deepseek, tmp_path):
    """A long chunk over what is on disk, a short one, single tokens, and one after a crop."""
    ids = prompt(2, 60)["input_ids"]
    with KVSwapCache(deepseek, tmp_path, COVERING) as cache:
        begin = 0
        for tokens in (20, 17, 3, 1, 1, -5, 1, 18):
            if tokens < 0:
                cache.crop(tokens)
                begin += tokens
                continue
            actual = forward(deepseek, ids[:, begin : begin + tokens], cache)
            begin += tokens
            expected = forward(deepseek, ids[:, :begin], None)[:, -tokens:]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("look_ahead", [True, False], ids=["ahead", "true-query"])
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "Mistral4"])
def test_native_chooses_as_the_reference(family, look_ahead, tmp_path, monkeypatch):
    model = every_model.build(family)
    config = dataclasses.replace(TIGHT, look_ahead=look_ahead)
    logits, chosen, stats = conversation(model, tmp_path, config, "native", monkeypatch)
    expected, _, _ = conversation(model, tmp_path, config, "reference", monkeypatch, chosen)
    torch.testing.assert_close(logits, expected)
    assert 3 < max(len(groups) for step in chosen for layer in step for groups in layer) <= 6
    assert stats.bytes_read > 0 and 0 < stats.hit_rate < 1


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_chooses_what_the_model_itself_attends_most(family, tmp_path):
    """With as many columns as a latent has numbers, the scores are the model's own attention."""
    model = every_model.build(family)
    ids = prompt(1, 61)["input_ids"]
    settings = SMALL | {"rank": RANK + ROTARY, "score": "mass", "look_ahead": False}
    config = SwapConfig(groups_max=4, pages_max=8, sink_tokens=0, **_without(settings))
    with KVSwapCache(model, tmp_path, config) as cache:
        forward(model, ids[:, :60], cache)
        forward(model, ids[:, 60:], cache)
        (chosen,) = cache.driver.session.last_selection(0)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(ids, output_attentions=True).attentions[0][0, :, -1]  # [heads, tokens]
    sealed = (61 - 4) // 2
    mass = weights[:, : 2 * sealed].sum(0).view(sealed, 2).sum(1)
    assert len(chosen) == 4
    assert_same_choice(chosen, mass.topk(4).indices.tolist(), mass, 4)


def _without(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "sink_tokens"}


def test_to_and_from_a_cache_in_memory(deepseek, tmp_path):
    inputs = prompt(2, 30, padding=(0, 6))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    longer = nn.functional.pad(mask, (0, 1), value=1)
    with KVSwapCache(deepseek, tmp_path, COVERING) as cache:
        forward(deepseek, ids, cache, attention_mask=mask)
        memory = cache.to_dynamic()
        plain = DynamicCache(config=deepseek.config)
        forward(deepseek, ids, plain, attention_mask=mask)
        for ours, theirs in zip(memory.layers, plain.layers, strict=True):
            valid = mask.bool()[:, None, :, None]
            torch.testing.assert_close(ours.keys * valid, theirs.keys * valid)
            torch.testing.assert_close(ours.values * valid, theirs.values * valid)
        with KVSwapCache.from_cache(
            deepseek, plain, tmp_path, attention_mask=mask, config=COVERING
        ) as other:
            step = forward(deepseek, ids[:, :1], plain, attention_mask=longer)
            again = forward(deepseek, ids[:, :1], other, attention_mask=longer)
            torch.testing.assert_close(again, step, rtol=1e-4, atol=1e-5)


def test_saved_forked_reordered_and_reset(deepseek, tmp_path):
    swapped_three_ways(deepseek, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_model(deepseek, dtype, tmp_path):
    """The error against fp32 is at most twice that of the model's own attention."""
    half = copy.deepcopy(deepseek).to(dtype)
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


class Adapted(nn.Module):
    """As an adapter stands: the layer in another, and a product of two narrow ones beside it."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) + self.up(self.down(rows))


def test_an_expansion_with_an_adapter(deepseek, tmp_path):
    model = copy.deepcopy(deepseek)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
    inputs = prompt(2, 37, padding=(0, 9))
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        actual = greedy(model, inputs, cache)
    expected = greedy(model, inputs)
    assert torch.equal(actual, expected)
    assert not torch.equal(expected, greedy(deepseek, inputs)), "the adapter changes nothing"


# What is refused, by name.


def refused(model: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        KVSwapCache(model, path="/", config=COVERING)


def test_what_is_refused_by_name(deepseek):
    other = copy.deepcopy(deepseek)
    attention = other.model.layers[0].self_attn
    usual = attention.expand_kv

    def twice_as_large(latents, rotated):
        keys, values = usual(latents, rotated)
        return keys, 2 * values

    attention.expand_kv = twice_as_large
    refused(other, "expands its latents otherwise than by kv_b_proj")
    odd = every_model.build("DeepseekV3")
    odd.model.layers[2].self_attn.kv_lora_rank = 48
    refused(odd, "whose latents differ in width")
    refused(copy.deepcopy(deepseek).to("meta"), "is on the meta device")


def test_a_place_that_is_refused(deepseek, monkeypatch):
    monkeypatch.setattr(families, "_device", lambda *arguments: torch.device("cuda:0"))
    refused(deepseek, "is done on the CPU alone")


def test_a_latent_of_an_odd_width_is_refused():
    config = every_model.build("DeepseekV3").config
    config.kv_lora_rank = 52
    refused(type(every_model.build("DeepseekV3"))(config).eval(), "multiple of 8, at most 1024")


def test_calibration_is_refused(deepseek):
    with pytest.raises(UnsupportedModelError, match="kvswap-tune: .* latents calibration does not"):
        Calibrator(deepseek)


# CompressKV's heads are of a calibrated model.
@pytest.mark.parametrize("preset", [each.name for each in PRESETS if each.name != "compresskv"])
def test_every_preset_runs_or_is_refused_by_its_setting(preset, deepseek, tmp_path):
    """What rounds tokens says so; everything else answers."""
    ids = prompt(1, 120)["input_ids"]
    try:
        cache = KVSwapCache(deepseek, tmp_path, preset=preset, max_context=128, max_batch=1)
    except (ConfigError, ValueError) as error:
        assert "sides=1" in str(error) and "which round some" in str(error)
        return
    with cache:
        logits = forward(deepseek, ids, cache)
        torch.testing.assert_close(logits, forward(deepseek, ids, None), rtol=1e-3, atol=1e-4)
        assert torch.isfinite(forward(deepseek, ids[:, :1], cache)).all()


def test_records_of_another_format_are_refused(deepseek, tmp_path):
    config = dataclasses.replace(COVERING, records="fp8")
    with pytest.raises((ConfigError, ValueError), match="sides=1.* the model's dtype"):
        KVSwapCache(deepseek, tmp_path, config)


# A prefill's chunk by expanded heads.


def products(latent: Latent, past: int, tokens: int, *, expanded: bool) -> int:
    """Of one head and sequence, counted query by query."""
    each = latent.rank * (latent.unrotated + latent.value)
    width = max(latent.query_dim, latent.value) if expanded else latent.head_dim
    own = sum(2 * width * (past + i + 1) for i in range(tokens))
    return own + each * (past + tokens if expanded else tokens)


@pytest.mark.parametrize("latent", [Latent(512, 64, 128, 128), Latent(56, 8, 8, 16)], ids=str)
def test_chunks_attend_in_fewer_products(latent):
    for past in (0, 1, 40, 5000):
        for tokens in (2, 17, 150, 171, 200, 4096):
            fewer = products(latent, past, tokens, expanded=True) < products(
                latent, past, tokens, expanded=False
            )
            assert latent.expands(past, tokens) == fewer, (past, tokens)
    lite = Latent(512, 64, 128, 128)
    assert lite.expands(0, 2), "a chunk alone is expanded once, and nothing is absorbed"
    assert not lite.expands(30000, 128) and lite.expands(30000, 256)


@pytest.mark.parametrize("family", ["DeepseekV2", "Mistral4"])
def test_a_prefill_expands_and_decoding_absorbs(family, tmp_path, monkeypatch):
    """What sessions are asked by: heads' own queries of long chunks, absorbed ones of steps."""
    model, seen = every_model.build(family), []
    usual = SessionDriver.attend

    def spied(driver, layer, query, *rest, expansion=None):
        name = "absorbed" if expansion is None else "expanded"
        seen.append((name, query.shape[2], query.shape[3]))
        return usual(driver, layer, query, *rest, expansion=expansion)

    monkeypatch.setattr(SessionDriver, "attend", spied)
    inputs = prompt(2, 37, padding=(0, 9))
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        actual = greedy(model, inputs, cache, tokens=4)
        latent = cache.parts.latent
    assert torch.equal(actual, greedy(model, inputs, tokens=4))
    assert set(seen) == {("expanded", 37, latent.query_dim), ("absorbed", 1, latent.head_dim)}
