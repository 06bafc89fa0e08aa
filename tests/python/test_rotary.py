"""Which channels of a head are pairs is the model's to say."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers

from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from kvswap_torch.hf import estimates
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.rotary import rotary_channels
from kvswap_torch.projection import from_chunk
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
PAIRS = SwapConfig(
    projection_kind="rope_pairs", rank=8, group_tokens=2, groups_max=3, pages_max=8, tail_tokens=4
)


def half_turned():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return tiny_model("phi3", rope_parameters=rope)


def other_model(name: str, **changes):
    """Of a family that tests of the cache have no need of."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=0, **changes,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("model", "channels"),
    [(lambda: tiny_model("llama"), 16), (lambda: tiny_model("gemma3"), 16), (half_turned, 8)],
    ids=["llama", "gemma3", "phi3"],
)
def test_channels_that_are_turned_are_those_that_change_with_the_position(model, channels):
    """Asked of the model's own rotation: which channels of a key does it leave alone?"""
    model = model()
    parts = model_parts(model)
    assert rotary_channels(parts) == channels
    rotary, kind = parts.decoder.rotary_emb, parts.kinds[parts.disk[0]]
    kinds = (kind,) if hasattr(rotary, f"{kind}_inv_freq") else ()
    cos, sin = rotary(torch.zeros(1, 1, 48), torch.full((1, 1), 3), *kinds)
    attention = parts.mixers[parts.disk[0]]
    modeling = importlib.import_module(type(attention).__module__)
    ones = torch.eye(parts.shape.head_dim)[None, None]
    turned = modeling.apply_rotary_pos_emb(ones, ones, cos, sin)[1][0, 0]
    together = [row.nonzero().flatten().tolist() for row in turned]
    half = channels // 2
    assert together[:half] == together[half:channels] == [[i, i + half] for i in range(half)]
    assert together[channels:] == [[i] for i in range(channels, len(ones[0, 0]))]


@needs_native
def test_a_cache_pairs_what_its_model_turns(tmp_path, monkeypatch):
    model, seen = half_turned(), []

    def watched(*arguments, **named):
        seen.append(named["rotary"])
        return from_chunk(*arguments, **named)

    monkeypatch.setattr(estimates, "from_chunk", watched)
    with KVSwapCache(model, tmp_path, PAIRS) as cache:
        greedy(model, prompt(1, 60), cache, tokens=4)
        assert "rope_pairs, not calibrated)" in cache.stats().projection
    assert seen == [8, 8]


@needs_native
def test_pairs_of_another_kind_are_refused_by_name(tmp_path):
    cohere = other_model("Cohere")
    with pytest.raises(ConfigError, match="CohereForCausalLM, which turns other pairs than i and"):
        KVSwapCache(cohere, tmp_path, PAIRS)
    still = other_model("OPT", ffn_dim=64, word_embed_proj_dim=64)
    with pytest.raises(ConfigError, match="OPTForCausalLM, which turns no channels"):
        KVSwapCache(still, tmp_path, PAIRS)
    rows = [{"batch": 1, "context": 99, "settings": {"projection_kind": "rope_pairs"}}]
    with pytest.raises(ConfigError, match="CohereForCausalLM, which turns other pairs"):
        KVSwapCache(cohere, tmp_path, SwapConfig(table=rows))
    with KVSwapCache(cohere, tmp_path, SwapConfig(projection_kind="channels", rank=7)):
        pass
