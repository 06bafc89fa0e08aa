"""The next layer's query: the fast path against the generic one, and both against the model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from torch import nn

from kvswap_torch import BudgetError, KVSwapCache
from kvswap_torch.hf import lookahead
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.lookahead import LookAhead, captured_query
from kvswap_torch.native import LIBRARY
from tests.python.tiny_models import (
    COVERING,
    FAMILIES,
    TIGHT,
    greedy,
    least_named,
    prompt,
    tiny_model,
)

FAST = ("llama", "qwen2", "qwen3", "mistral")
needs_library = pytest.mark.skipif(not LIBRARY.is_file(), reason="libkvswap_torch.so is not built")


def attention_calls(model, ids):
    """What each attention is called with, and the query it makes of it (by the generic path)."""
    calls = {}

    def keep(module, args, kwargs):
        calls[module.layer_idx] = dict(kwargs)

    attentions = [layer.self_attn for layer in model.model.layers]
    handles = [a.register_forward_pre_hook(keep, with_kwargs=True) for a in attentions]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAST)
def test_fast_path_is_the_generic_one(family, dtype, open_cache):
    model = tiny_model(family, dtype=dtype)
    open_cache(model)  # the generic path needs our attention function
    calls = attention_calls(model, prompt(2, 5)["input_ids"])
    hidden, kwargs = calls[0]["hidden_states"], calls[0]
    parts = model_parts(model)
    generic = captured_query(parts.mixers[1], hidden, kwargs["position_embeddings"], kwargs)
    shape = parts.shape
    assert generic.shape == (2, shape.heads, 5, shape.head_dim)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.1}
    )

    fast = LookAhead(parts, kv_memory_bytes=1)  # too small for summed projections
    assert fast.description == "fast" and fast.nbytes == 0
    query = fast.predict(1, 0, hidden, kwargs)
    torch.testing.assert_close(query, generic, **tolerance)

    summing = LookAhead(parts)
    if family == "qwen3":
        assert not summing.summed  # q_norm is not linear
        return
    assert summing.description == "fast, heads summed" and summing.nbytes > 0
    query = summing.predict(1, 0, hidden, kwargs)
    expected = generic.float().unflatten(1, (shape.kv_heads, -1)).sum(2)
    torch.testing.assert_close(query.float(), expected, **tolerance)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_right_input_gives_the_true_query(family, open_cache):
    """Fed with layer i's own input, the prediction for layer i is its query."""
    model = tiny_model(family)
    open_cache(model)
    calls = attention_calls(model, prompt(2, 5)["input_ids"])
    parts = model_parts(model)
    look_ahead = LookAhead(parts, kv_memory_bytes=1)
    for index in parts.disk:
        attention, kwargs = parts.mixers[index], calls[index]
        query = look_ahead.predict(index, index, kwargs["hidden_states"], kwargs)
        shape = (2, 5, -1, attention.head_dim)
        if hasattr(attention, "q_proj"):
            raw = attention.q_proj(kwargs["hidden_states"]).view(shape)
        else:
            width = attention.config.num_attention_heads * attention.head_dim
            raw = attention.qkv_proj(kwargs["hidden_states"])[..., :width].view(shape)
        if hasattr(attention, "q_norm"):
            raw = attention.q_norm(raw)
        modeling = __import__(type(attention).__module__, fromlist=["apply_rotary_pos_emb"])
        raw = raw.transpose(1, 2)
        expected, _ = modeling.apply_rotary_pos_emb(raw, raw, *kwargs["position_embeddings"])
        torch.testing.assert_close(query, expected)


def test_hybrid_uses_the_target_layers_rotary(open_cache):
    """Gemma 3's full layers turn with another base than the sliding layer before them."""
    model = tiny_model("gemma3")
    open_cache(model)
    calls = attention_calls(model, prompt(1, 4)["input_ids"])
    parts = model_parts(model)
    assert parts.disk == (1, 3)
    query = LookAhead(parts).predict(1, 0, calls[0]["hidden_states"], calls[0])
    embeddings = calls[1]["position_embeddings"]
    expected = captured_query(parts.mixers[1], calls[0]["hidden_states"], embeddings, calls[0])
    torch.testing.assert_close(query, expected)
    assert not torch.equal(embeddings[0], calls[0]["position_embeddings"][0])


class LowRankAdapter(nn.Module):
    """A projection wrapped as PEFT's LoRA wraps it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + self.up(self.down(hidden))


@pytest.mark.parametrize("config", [COVERING, TIGHT], ids=["covering", "tight"])
def test_wrapped_projections_take_the_generic_path(config, open_cache):
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = LowRankAdapter(attention.q_proj)
    cache = open_cache(model, config)
    if LIBRARY.is_file():
        assert "2 of 3 layers" in cache.stats().predictor
    inputs = prompt(2, 20)
    out = greedy(model, inputs, cache)
    if config is COVERING:
        assert torch.equal(out, greedy(model, inputs))


def test_look_ahead_reaches_every_layer_but_the_first(open_cache, monkeypatch):
    model = tiny_model("llama")
    cache = open_cache(model, TIGHT)
    asked = []
    session = cache.driver.session
    look_ahead = type(session).look_ahead
    monkeypatch.setattr(
        cache.driver, "look_ahead", lambda layer, query, *_: asked.append((layer, query.shape))
    )
    greedy(model, prompt(1, 20), cache, tokens=3)
    kv_heads = 2 if LIBRARY.is_file() else 4
    assert asked == [(1, (1, kv_heads, 1, 16)), (2, (1, kv_heads, 1, 16))] * 2
    assert look_ahead is type(session).look_ahead


def test_look_ahead_can_be_switched_off(open_cache, monkeypatch):
    model = tiny_model("llama")
    cache = open_cache(model, dataclasses.replace(TIGHT, look_ahead=False))
    monkeypatch.setattr(LookAhead, "predict", lambda *a: pytest.fail("predicted"))
    greedy(model, prompt(1, 20), cache, tokens=3)
    assert cache.stats().predictor == "off"


def test_the_predictor_is_built_and_charged_only_where_settings_look_ahead(sessions, tmp_path):
    model = tiny_model("llama")
    for look_ahead in (False, True):
        config = dataclasses.replace(TIGHT, look_ahead=look_ahead)
        with KVSwapCache(model, tmp_path, config, kv_memory_bytes="4MiB") as cache:
            built, stats = cache._look_ahead._fast, cache.stats()
            assert (built is not None) == look_ahead
            assert ("predictor" in stats.ledger) == (look_ahead and LIBRARY.is_file())
            assert stats.resident_bytes == sum(stats.ledger.values())
            greedy(model, prompt(1, 20), cache, tokens=3)
            assert stats.predictor.endswith("not calibrated" if look_ahead else "off")
    with KVSwapCache(model, tmp_path) as cache:
        assert cache.driver.config.look_ahead == "verify"  # which needs no calibration


@needs_library
def test_sums_are_given_up_where_the_rest_would_not_fit(tmp_path):
    """The smallest budget that is named opens, and all above it."""
    model, inputs = tiny_model("llama"), prompt(1, 60)
    config = dataclasses.replace(TIGHT, look_ahead=True, score="sum")
    promised = {"max_context": 128, "max_batch": 1}
    with pytest.raises(BudgetError) as refused:
        KVSwapCache(model, tmp_path, config, kv_memory_bytes=1, **promised)
    least = least_named(refused.value)
    summed = LookAhead(model_parts(model)).nbytes
    answers, predictors = [], set()
    for budget in (least, least + summed // 2, least + summed, 2 * least):
        with KVSwapCache(model, tmp_path, config, kv_memory_bytes=budget, **promised) as cache:
            answers.append(greedy(model, inputs, cache, tokens=8))
            stats = cache.stats()
            assert stats.resident_bytes_peak <= budget
            predictors.add(stats.predictor)
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert predictors == {"fast, not calibrated", "fast, heads summed, not calibrated"}
    with pytest.raises(BudgetError):
        KVSwapCache(model, tmp_path, config, kv_memory_bytes=least - 1, **promised)


@needs_library
def test_a_saved_cache_opens_in_the_smallest_budget_that_is_named(tmp_path):
    model = tiny_model("llama")
    config = dataclasses.replace(TIGHT, look_ahead=True, score="sum")
    with KVSwapCache(model, tmp_path, config) as cache:
        greedy(model, prompt(1, 60), cache, tokens=8)
        cache.save(tmp_path / "saved")

    def opened(budget):
        return KVSwapCache.open(model, tmp_path / "saved", path=tmp_path, kv_memory_bytes=budget)

    with pytest.raises(BudgetError) as refused:
        opened(1)
    least = least_named(refused.value)
    with opened(least) as cache:
        assert cache.stats().predictor.startswith("fast, not"), "no memory is left for sums"
    with opened(4 * least) as cache:
        assert cache.stats().predictor.startswith("fast, heads summed")
    with pytest.raises(BudgetError):
        opened(least - 1)


class ScaledWeight(torch.Tensor):
    """A weight that is stored in another way than its numbers say, as quantised ones are.

    Whoever takes the stored numbers for the weight is wrong by a factor of 4.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def plain(value):
            return 4 * value.as_subclass(torch.Tensor) if isinstance(value, cls) else value

        if function is torch.nn.functional.linear:
            return function(*map(plain, args), **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_weight_of_another_kind_takes_the_generic_path(look_ahead, open_cache):
    model = tiny_model("llama")
    for layer in model.model.layers:
        projection = layer.self_attn.q_proj
        stored = (projection.weight.detach() / 4).as_subclass(ScaledWeight)
        projection.weight = nn.Parameter(stored, requires_grad=False)
        assert type(projection.weight) is not nn.Parameter
    inputs = prompt(2, 20)
    cache = open_cache(model, dataclasses.replace(COVERING, look_ahead=look_ahead))
    assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))
    if look_ahead:
        assert cache.stats().predictor == "generic, not calibrated"


@pytest.mark.parametrize("look_ahead", [True, False])
def test_torchao_int8_weights(look_ahead, open_cache):
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    inputs = prompt(1, 20)
    cache = open_cache(model, dataclasses.replace(COVERING, look_ahead=look_ahead))
    assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))


def test_without_the_library_everything_is_generic(monkeypatch, tmp_path):
    monkeypatch.setattr(lookahead, "LIBRARY", tmp_path / "none.so")
    assert LookAhead(model_parts(tiny_model("llama"))).description == "generic"


@needs_library
def test_predictor_refuses_wrong_shapes():
    LookAhead(model_parts(tiny_model("llama")))  # loads the library
    predictor = torch.classes.kvswap_torch.QueryPredictor
    weight = torch.randn(64, 48)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        predictor(weight, None, None, 0.0, 4, 3, False)
    with pytest.raises(ValueError, match="bias must have 64"):
        predictor(weight, torch.zeros(3), None, 0.0, 4, 2, False)
    with pytest.raises(ValueError, match="without q_norm"):
        predictor(weight, None, torch.ones(16), 1e-6, 4, 2, True)
    right = predictor(weight, None, None, 0.0, 4, 2, True)
    cos = torch.ones(1, 3, 16)
    with pytest.raises(ValueError, match=r"hidden must be \[batch, tokens, 48\]"):
        right.predict(torch.zeros(1, 3, 47), cos, cos)
    with pytest.raises(ValueError, match="cos and sin"):
        right.predict(torch.zeros(1, 3, 48), torch.ones(1, 3, 18), torch.ones(1, 3, 18))
    assert right.predict(torch.zeros(1, 3, 48), cos, cos).shape == (1, 2, 3, 16)


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_single_token_in_half_precision_is_projected_as_torch_does(dtype, has_bias):
    """Its product is our own: the same sums, in another order."""
    LookAhead(model_parts(tiny_model("llama")))  # loads the library
    torch.manual_seed(0)
    weight = torch.randn(64, 48, dtype=dtype)
    bias = torch.randn(64, dtype=dtype) if has_bias else None
    predictor = torch.classes.kvswap_torch.QueryPredictor(weight, bias, None, 0.0, 4, 2, False)
    for hidden in (
        torch.randn(1, 1, 48, dtype=dtype),
        torch.randn(1, 1, 96, dtype=dtype)[..., ::2],
    ):
        unturned = torch.ones(1, 1, 16, dtype=dtype), torch.zeros(1, 1, 16, dtype=dtype)
        query = predictor.predict(hidden, *unturned)
        expected = nn.functional.linear(hidden, weight, bias).view(1, 1, 4, 16).transpose(1, 2)
        torch.testing.assert_close(query, expected, rtol=2**-7, atol=2**-4)


def test_families_that_name_the_cache_differently(open_cache):
    """GPT-NeoX passes it as layer_past and has one projection for all; nothing is written twice."""
    torch.manual_seed(0)
    settings = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = transformers.GPTNeoXConfig(vocab_size=97, intermediate_size=64, **settings)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    inputs = prompt(2, 20, padding=(0, 5))
    cache = open_cache(model, COVERING)
    assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))
    cache.close()
    tight = open_cache(model, TIGHT)
    greedy(model, inputs, tight)
    assert tight.get_seq_length() == 31 and tight.stats().predictor == "generic, not calibrated"
