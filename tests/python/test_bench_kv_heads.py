"""`bench.kv_heads`: another number of KV heads, the same function."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.kv_heads import with_kv_heads
from tests.python.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
    )
    made = Qwen3ForCausalLM(config).eval()
    for layer in made.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    return made


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_the_function_stays_and_the_heads_change(model, kv_heads):
    ids = torch.arange(40)[None] * 7 % 64
    other = with_kv_heads(model, kv_heads)
    assert other.config.num_key_value_heads == kv_heads
    with torch.inference_mode():
        torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
        made = other(ids, use_cache=True).past_key_values
    assert made.layers[0].keys.shape[1] == kv_heads


@pytest.mark.parametrize("kv_heads", [3, 16])
def test_what_does_not_divide_is_refused(model, kv_heads):
    with pytest.raises(ValueError, match=f"a multiple or divisor of its 4 KV heads, .*{kv_heads}"):
        with_kv_heads(model, kv_heads)


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="must be a qwen3"):
        with_kv_heads(tiny_model("llama"), 1)
