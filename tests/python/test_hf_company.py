"""Other code that holds a cache: conversion, kvpress' way, autocast, compiled models, messages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import KVSwapCache, KVSwapError, UnsupportedModelError
from tests.python.tiny_models import (
    COVERING,
    TIGHT,
    character_tokenizer,
    forward,
    greedy,
    prompt,
    tiny_model,
)

# Into memory and out of it.


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("padding", [(), (0, 6)], ids=["even", "left-padded"])
@pytest.mark.pairs
def test_from_cache_and_back(family, padding, sessions, tmp_path):
    model = tiny_model(family)
    inputs = prompt(2, 20, padding=padding)
    plain = DynamicCache(config=model.config)
    first = greedy(model, inputs, plain, tokens=4)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)
    held = {"input_ids": first, "attention_mask": mask}
    positions = plain.get_seq_length()
    arguments = {"attention_mask": mask[:, :positions], "config": COVERING}
    with KVSwapCache.from_cache(model, plain, tmp_path, **arguments) as cache:
        assert cache.get_seq_length() == positions and cache.batch_size == 2
        back = cache.to_dynamic()
        expected = greedy(model, held, plain)
        assert torch.equal(greedy(model, held, cache), expected)
        assert torch.equal(greedy(model, held, back), expected)
    assert back.get_seq_length() == plain.get_seq_length()


def test_from_cache_chooses_groups_when_it_must(llama, sessions, tmp_path):
    """Without a prefill the projection comes from what is on disk."""
    ids, plain = prompt(1, 40)["input_ids"], DynamicCache(config=llama.config)
    forward(llama, ids, plain)
    with KVSwapCache.from_cache(llama, plain, tmp_path, config=TIGHT) as cache:
        forward(llama, ids[:, :1], cache)
        assert cache.get_seq_length() == 41 and cache.stats().groups_per_step > 0


def test_from_cache_refuses_what_is_not_the_models(llama, gemma, sessions, tmp_path):
    ids = prompt(1, 12)["input_ids"]
    other, empty = DynamicCache(config=gemma.config), DynamicCache(config=llama.config)
    forward(gemma, ids, other)
    with pytest.raises(ValueError, match=r"cache of LlamaForCausalLM, with 3 layers, got .* 4"):
        KVSwapCache.from_cache(llama, other, tmp_path)
    with pytest.raises(ValueError, match="got an empty one"):
        KVSwapCache.from_cache(llama, empty, tmp_path)
    wide = tiny_model("llama", head_dim=32)
    plain = DynamicCache(config=wide.config)
    forward(wide, ids, plain)
    with pytest.raises(ValueError, match=r"must hold \[1, 2, 12, 16\].*got \[1, 2, 12, 32\]"):
        KVSwapCache.from_cache(llama, plain, tmp_path)
    assert llama.config._attn_implementation == "sdpa" and not list(tmp_path.iterdir())


# As kvpress' pipeline does it: read a document, answer a question, cut the layers, the next one.


def answer(model, cache, question, length: int) -> list[int]:
    positions = torch.arange(length, length + question.shape[1])[None]
    logits = forward(model, question, cache, position_ids=positions, logits_to_keep=1)
    ids = [logits[0, -1].argmax()]
    for position in range(positions[0, -1] + 1, positions[0, -1] + 7):
        step = torch.tensor([[position]])
        logits = forward(model, ids[-1].view(1, 1), cache, position_ids=step)
        ids.append(logits[0, -1].argmax())
    return [int(each) for each in ids]


def test_questions_between_which_layers_are_cut(llama, open_cache):
    document = prompt(1, 24)["input_ids"]
    questions = [prompt(1, tokens, seed=tokens)["input_ids"] for tokens in (6, 9, 3)]
    answers = []
    for cache in (DynamicCache(config=llama.config), open_cache(llama)):
        with torch.no_grad():
            llama.model(input_ids=document, past_key_values=cache)
        lengths = [cache.get_seq_length(index) for index in range(len(cache))]
        for question in questions:
            answers.append(answer(llama, cache, question, 24))
            for layer, length in zip(cache.layers, lengths, strict=True):
                layer.keys = layer.keys[:, :, :length]
                layer.values = layer.values[:, :, :length]
            assert cache.get_seq_length() == 24
    assert answers[:3] == answers[3:]


@pytest.mark.parametrize("sessions", ["native"], indirect=True)
def test_kvpress_own_pipeline(open_cache):
    kvpress = pytest.importorskip("kvpress", reason="kvpress is no dependency of the tests")
    # Made and imported here: kvpress changes transformers' attention functions when imported.
    model = tiny_model("llama")
    pipeline = kvpress.KVPressTextGenerationPipeline(
        model=model, tokenizer=character_tokenizer(), device="cpu"
    )
    asked = {"questions": ["Who?", "And_how_many?", "Why"], "max_new_tokens": 8}
    document = "the_quick_brown_fox_jumps_over_the_lazy_dog"
    expected = pipeline(document, cache=DynamicCache(config=model.config), **asked)
    cache = open_cache(model)
    assert pipeline(document, cache=cache, **asked) == expected
    assert cache.get_seq_length() == 1 + len(document) and len(set(expected["answers"])) == 3


def test_views_know_their_shape_and_say_that_they_are_no_tensors(llama, open_cache):
    cache = open_cache(llama)
    assert cache.layers[0].keys is None
    forward(llama, prompt(2, 12)["input_ids"], cache)
    layer = cache.layers[0]
    keys = layer.keys
    assert keys.shape == keys.size() == (2, 2, 12, 16) and keys.dtype == torch.float32
    assert keys[:, :, :-2].size(2) == 10
    for use in (
        lambda: torch.cat([keys, keys], 2),
        lambda: keys.mean(),
        lambda: keys[0],
        lambda: keys[:, :, 3:],
        lambda: keys[:1, :, :3],
    ):
        with pytest.raises(TypeError, match=r"are no tensor.*cache.crop\(\)"):
            use()
    with pytest.raises(TypeError, match=r"can only be cut.*got a Tensor; crop\(\)"):
        layer.keys = torch.zeros(2, 2, 12, 16)
    with pytest.raises(TypeError, match="can only be cut"):
        layer.values = keys[:, :, :3]
    layer.keys = keys[:, :, :8]
    with pytest.raises(ValueError, match="must be cut together, got 1 of 6"):
        forward(llama, prompt(2, 1)["input_ids"], cache)
    with pytest.raises(ValueError, match="cut alike, to 8 positions, got 7"):
        layer.values = layer.values[:, :, :7]


# What the user did is what the message names.


def test_autocast_is_followed(llama, open_cache):
    ids = prompt(1, 20)["input_ids"]
    cache = open_cache(llama)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = forward(llama, ids, None)
        parts = [forward(llama, part, cache) for part in ids.split([16, 1, 3], 1)]
        forward(llama, ids[:, :4], open_cache(llama))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0.05, atol=0.1)


def test_a_model_that_changed_its_type_is_refused(open_cache):
    model = tiny_model("llama")
    cache = open_cache(model)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"must stay torch.float32.*after model.to\(\)"):
        forward(model, prompt(1, 8)["input_ids"], cache)


def test_another_attention_while_open_is_refused(open_cache):
    model, ids = tiny_model("llama"), prompt(1, 8)["input_ids"]
    cache = open_cache(model)
    model.set_attn_implementation("eager")
    with pytest.raises(KVSwapError, match=r"got 'eager' from set_attn_implementation\(\)"):
        forward(model, ids, cache)
    cache.close()
    assert model.config._attn_implementation == "eager"


def test_a_compiled_model_is_looked_through(open_cache):
    model, inputs = tiny_model("llama"), prompt(2, 12, padding=(0, 3))
    compiled = torch.compile(model, backend="eager")
    cache = open_cache(compiled)
    assert cache.parts.outermost is model
    assert torch.equal(greedy(compiled, inputs, cache), greedy(model, inputs))


def compiled_in_place(model):
    model.compile(backend="eager")


def compiled_decoder(model):
    model.model.forward = torch.compile(model.model.forward, backend="eager")


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


@pytest.mark.filterwarnings("ignore")  # torch's, on what it cannot trace
@pytest.mark.parametrize("sessions", ["native"], indirect=True)
@pytest.mark.parametrize(
    "compile_part",
    [
        compiled_layers,
        pytest.param(compiled_in_place, marks=pytest.mark.long),
        pytest.param(compiled_decoder, marks=pytest.mark.long),
    ],
)
def test_a_compiled_forward_is_refused_by_name(compile_part, open_cache):
    model, inputs = tiny_model("llama"), prompt(2, 12)
    expected = greedy(model, inputs)
    compile_part(model)
    cache = open_cache(model)
    with pytest.raises(UnsupportedModelError, match=r"torch.compile\(\) was applied to Llama"):
        greedy(model, inputs, cache)
    cache.close()
    torch.compiler.reset()
    assert torch.equal(greedy(model, inputs), expected)


# Weights that are kept elsewhere or otherwise.


@pytest.mark.parametrize("sessions", ["native"], indirect=True)
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("part", ["lm_head", "model.layers.1"])
def test_offloaded_parts(part, where, open_cache, tmp_path):
    """As accelerate's own files; test_hf_offloaded has checkpoints in safetensors."""
    from accelerate import dispatch_model

    model, inputs = tiny_model("llama"), prompt(2, 20, padding=(0, 5))
    expected = greedy(model, inputs)
    parts = ("embed_tokens", "rotary_emb", "norm", *(f"layers.{i}" for i in range(3)))
    places = {f"model.{each}": "cpu" for each in parts} | {"lm_head": "cpu", part: where}
    arguments = {"main_device": "cpu", "offload_dir": tmp_path / "parts", "force_hooks": True}
    dispatch_model(model, places, **arguments)
    assert torch.equal(greedy(model, inputs, open_cache(model)), expected)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("sessions", ["native"], indirect=True)
@pytest.mark.parametrize("look_ahead", [True, False])
def test_dynamically_quantised_weights(look_ahead, open_cache):
    """Their modules have no parameters at all."""
    quantize = torch.ao.quantization.quantize_dynamic
    model = quantize(tiny_model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    assert not list(model.model.layers[0].self_attn.parameters())
    inputs = prompt(2, 20, padding=(0, 5))
    cache = open_cache(model, dataclasses.replace(COVERING, look_ahead=look_ahead))
    assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))
