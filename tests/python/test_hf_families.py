"""Which models are taken, and by what name the others are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from torch import nn

from kvswap_torch import KVSwapCache, UnsupportedModelError
from kvswap_torch.hf.families import model_parts
from tests.python import every_model
from tests.python.tiny_models import (
    COVERING,
    FAMILIES,
    config_of,
    forward,
    greedy,
    prompt,
    tiny_model,
)

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_parts(family):
    model = tiny_model(family)
    for outer in (model, model.model):
        parts = model_parts(outer)
        assert parts.decoder is model.model and parts.config is model.config
        assert parts.disk == (
            (1, 3) if family == "gemma3" else tuple(range(len(model.model.layers)))
        )
        assert all(parts.mixers[i] is model.model.layers[i].self_attn for i in parts.disk)
        assert parts.shape.heads == 4 and parts.shape.kv_heads == 2 and parts.shape.head_dim == 16
        assert parts.identity.model_type == model.config.model_type
        assert parts.identity.layers == len(parts.disk) and parts.identity.dtype == "float32"


def test_a_window_as_long_as_the_model_is_full_attention(open_cache):
    """Phi-3's 128K models have a window of 262,144 tokens."""
    model = tiny_model("phi3", sliding_window=512)
    assert model_parts(model).disk == (0, 1)
    inputs = prompt(2, 20, padding=(0, 6))
    assert torch.equal(greedy(model, inputs, open_cache(model)), greedy(model, inputs))


def test_values_narrower_than_keys(tmp_path):
    """MiMo V2: what is read back is as wide as the model's own, and going on gives its tokens."""
    model, ids = every_model.build("MiMoV2Flash"), prompt(2, 30)["input_ids"]
    plain = transformers.DynamicCache(config=model.config)
    expected = forward(model, ids, plain)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        torch.testing.assert_close(forward(model, ids, cache), expected)
        memory = cache.to_dynamic()
        for index in cache.parts.disk:
            ours, theirs = memory.layers[index], plain.layers[index]
            assert (ours.keys.shape[3], ours.values.shape[3]) == (24, 16)
            torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
            heads = ours.keys.shape[1]
            shown = cache.layers[index].values.shape
            assert shown == theirs.values.shape
        stats, layers = cache.stats(), len(cache.parts.disk)
        # 13 groups of each sequence, in blocks of 512 bytes.
        record = heads * 2 * (24 + 16) * 4
        assert stats.kv_bytes_on_disk == 2 * 13 * layers * -(-record // 512) * 512
        assert stats.kv_bytes_full == 2 * 30 * layers * heads * (24 + 16) * 4
    with KVSwapCache.from_cache(model, plain, tmp_path, config=COVERING) as cache:
        step = prompt(2, 1, seed=4)["input_ids"]
        torch.testing.assert_close(forward(model, step, cache), forward(model, step, plain))


def test_peft_wrappers_are_looked_through():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def get_base_model(self):
            return self.model

    model = tiny_model("llama")
    assert model_parts(Wrapper(model)).outermost is model


def test_the_text_part_of_an_image_model(open_cache):
    """Gemma 3 with its vision tower: the text model alone is switched; images are refused."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28,
              "num_attention_heads": 2, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=config_of("gemma3"), vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    cache, inputs = open_cache(model), prompt(2, 20, padding=(0, 5))
    kinds = [part._attn_implementation for part in (config, config.text_config)]
    assert kinds == ["sdpa", "kvswap"] and config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))
    cache.reset()
    with pytest.raises(ValueError, match="no token_type_ids"):
        greedy(model, inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}, cache)


def refused(model, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} .*{why}"):
        KVSwapCache(model, path="/", config=COVERING)


def build(name: str, **settings):
    config = getattr(transformers, f"{name}Config")(**(TINY | settings))
    return getattr(transformers, f"{name}ForCausalLM")(config)


def test_what_is_refused_by_name():
    refused(build("Mistral", sliding_window=16), "no full-attention layer .windows of 16 tokens")
    refused(build("Bloom", n_head=2, n_layer=2), "computes attention itself")
    encoder_decoder = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    refused(encoder_decoder, "encoder-decoder")
    refused(tiny_model("llama", head_dim=12), "heads of 12 .*multiple of 8")
    refused(tiny_model("llama").double(), "torch.float64")
    refused(tiny_model("llama").to("meta"), "has no weights.*device_map=None")
    bidirectional = tiny_model("gemma3", use_bidirectional_attention=True)
    refused(bidirectional, "later tokens")


def test_attention_outside_the_interface_is_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model.model), "_can_set_attn_implementation_cached_value", False)
    refused(model, "computes attention itself")
    assert model.config._attn_implementation == "sdpa"


def test_options_of_attention_are_never_ignored(open_cache):
    """A model that passes what the kernel cannot do is stopped, not answered wrongly."""
    model, bias = tiny_model("llama"), torch.ones(4)
    cache = open_cache(model)
    with pytest.raises(UnsupportedModelError, match="position_bias"), torch.no_grad():
        model(prompt(1, 8)["input_ids"], past_key_values=cache, position_bias=bias)


@pytest.mark.parametrize("padding", [(), (0, 5)], ids=["even", "left-padded"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
@pytest.mark.pairs
def test_capped_scores_and_sinks(name, heads, padding, open_cache):
    """By short chunks, long ones and tokens, beside the eager attention, which has both."""
    own = {"num_local_experts": 2, "num_experts_per_tok": 1} if name == "GptOss" else {}
    own |= {"num_hidden_layers": 4, "sliding_window": 8, "attn_implementation": "eager"}
    torch.manual_seed(0)
    model = build(name, **own).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 1)
    inputs = prompt(2, 21, padding=padding)
    expected = greedy(model, inputs)
    config = dataclasses.replace(COVERING, heads=heads)
    assert torch.equal(greedy(model, inputs, open_cache(model, config)), expected)
    chunked = greedy(model, inputs, open_cache(model, config), prefill_chunk_size=3)
    assert torch.equal(chunked, expected)


def test_training_dropout_is_refused(open_cache):
    model = tiny_model("llama", attention_dropout=0.1).train()
    cache = open_cache(model)
    with pytest.raises(UnsupportedModelError, match=r"dropout must be 0.*eval"), torch.no_grad():
        model(prompt(1, 8)["input_ids"], past_key_values=cache)


def test_config_hash_tells_models_apart():
    from kvswap_torch.hf.families import config_hash

    assert config_hash(config_of("llama")) == config_hash(config_of("llama"))
    assert config_hash(config_of("llama")) != config_hash(config_of("llama", hidden_size=64))
