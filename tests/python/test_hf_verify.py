"""Predicted queries prefetch for the next layer, and change no choice (``look_ahead="verify"``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from transformers import Olmo2Config, Olmo2ForCausalLM

from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.lookahead import LookAhead
from tests.python import every_model
from tests.python.tiny_models import TIGHT, greedy, has_native, prompt, tiny_model

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")


@pytest.fixture(autouse=True)
def _native(sessions: str) -> None:
    if sessions == "reference":
        pytest.skip("the reference prefetches nothing")


def decoded(model: Any, open_cache: Any, **settings: Any) -> tuple[Any, list[Any], Any]:
    """Tokens, each layer's last choice, and stats."""
    cache = open_cache(model, dataclasses.replace(TIGHT, **settings))
    tokens = greedy(model, prompt(2, 60, padding=(0, 5)), cache, tokens=24)
    session = cache.driver.session
    chosen = [session.last_selection(layer) for layer in range(len(cache.parts.disk))]
    stats = cache.stats()
    cache.close()
    return tokens, chosen, stats


@pytest.mark.parametrize("score", ["sum", "max", "mass", "max_mass"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.pairs
def test_choices_are_the_true_querys(family: str, score: str, open_cache: Any) -> None:
    assert_same_choices(tiny_model(family), score, open_cache)


# Rotary channels interleaved, as complex numbers, and in halves.
KNOWN = ("DeepseekV3", "DeepseekV2", "MiniCPM3")
LATENT = [family for family in KNOWN if hasattr(transformers, f"{family}ForCausalLM")]


@pytest.mark.parametrize("sessions", ["native"], indirect=True)
@pytest.mark.parametrize("score", ["sum", "max", "mass", "max_mass"])
@pytest.mark.parametrize("family", LATENT)
@pytest.mark.pairs(once=["family", "score"])
def test_choices_over_latents_are_the_true_querys(family: str, score: str, open_cache: Any) -> None:
    """Predicted queries take W_UK in before they prefetch."""
    assert_same_choices(every_model.build(family), score, open_cache)


def assert_same_choices(model: Any, score: str, open_cache: Any) -> None:
    """Tokens and choices of "verify" are those of "off"; only reads come earlier."""
    alone = decoded(model, open_cache, look_ahead="off", score=score)
    verified = decoded(model, open_cache, look_ahead="verify", score=score)
    assert torch.equal(alone[0], verified[0]) and alone[1] == verified[1]
    assert alone[2].prefetch_hits is None and alone[2].predictor == "off"
    stats = verified[2]
    assert stats.predictor.endswith(", verified") and stats.prefetch_hits > 0
    assert stats.prefetch_hits + stats.prefetch_wasted == stats.counters["groups_prefetched"]
    assert stats.hit_rate > alone[2].hit_rate and 0 <= stats.hidden_share <= 1
    assert "in vain" in str(stats)


def test_without_a_page_to_spare_it_is_off_by_name(open_cache: Any) -> None:
    stats = decoded(
        tiny_model("llama"), open_cache, look_ahead="verify", groups_max=8, pages_max=8
    )[2]
    assert stats.predictor.startswith("off: memory.pages_per_layer") and stats.prefetch_hits is None


def test_layers_that_are_named_are_not_predicted(open_cache: Any) -> None:
    stats = decoded(tiny_model("llama"), open_cache, look_ahead="verify", true_query_layers=(1,))[2]
    assert stats.counters["prefetch_hits_1"] == stats.counters["prefetch_wasted_1"] == 0
    assert stats.counters["prefetch_hits_2"] > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_without_an_mlp_between_the_prediction_is_the_query(family: str, open_cache: Any) -> None:
    """After attention the MLP is all that a prediction lacks."""
    model = tiny_model(family)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    open_cache(model)  # the generic way needs our attention function
    ahead = LookAhead(model_parts(model), kv_memory_bytes=1)
    residuals, calls = {}, {}
    layers = list(ahead.after_attention)
    assert layers == [index - 1 for index in model_parts(model).disk if index > 0]
    for index, norm in ahead.after_attention.items():
        norm.register_forward_pre_hook(lambda _, args, i=index: residuals.update({i: args[0]}))
    for index, mixer in enumerate(model_parts(model).mixers):
        mixer.register_forward_pre_hook(
            lambda _, args, kwargs, i=index: calls.update({i: kwargs}), with_kwargs=True
        )
    with torch.no_grad():
        model(**prompt(2, 5), use_cache=False)
        for index in layers:
            after = ahead.predict_after_attention(index + 1, residuals[index], calls[index])
            true = ahead.predict(index + 1, index + 1, calls[index + 1]["hidden_states"],
                                 calls[index + 1])  # fmt: skip
            torch.testing.assert_close(after, true, rtol=1e-4, atol=1e-5)


def test_norms_of_what_attention_returns_are_not_taken() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    none = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"))
    config = Olmo2Config(vocab_size=64, num_hidden_layers=3, **sizes, **none)
    assert not LookAhead(model_parts(Olmo2ForCausalLM(config))).after_attention
