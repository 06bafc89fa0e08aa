"""With a budget that covers the context, tokens equal DynamicCache's, however it is driven."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.python.tiny_models import FAMILIES, PAD, greedy, prompt, tiny_model


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest):
    return tiny_model(request.param)


@pytest.mark.parametrize("padding", [(), (0, 7, 3)], ids=["even", "left-padded"])
def test_greedy_batches(model, open_cache, padding):
    inputs = prompt(3, 21, padding=padding)
    expected = greedy(model, inputs)
    assert torch.equal(greedy(model, inputs, open_cache(model)), expected)


def test_short_prompts_and_one_token(model, open_cache):
    for tokens in (1, 2, 4, 5):
        inputs = prompt(2, tokens)
        cache = open_cache(model)
        assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs)), tokens
        cache.close()


def test_sampling_with_a_seed(model, open_cache):
    inputs = prompt(2, 20, padding=(0, 4))
    torch.manual_seed(5)
    expected = greedy(model, inputs, do_sample=True, top_k=20, num_return_sequences=2)
    torch.manual_seed(5)
    cache = open_cache(model)
    actual = greedy(model, inputs, cache, do_sample=True, top_k=20, num_return_sequences=2)
    assert torch.equal(actual, expected)


def test_beam_search(model, open_cache):
    inputs = prompt(2, 18, padding=(3, 0))
    arguments = {"num_beams": 3, "num_return_sequences": 2, "tokens": 10}
    expected = greedy(model, inputs, **arguments)
    assert torch.equal(greedy(model, inputs, open_cache(model), **arguments), expected)


def test_prompt_lookup_decoding(model, open_cache):
    inputs = prompt(1, 8)
    inputs = {name: tensor.repeat(1, 3) for name, tensor in inputs.items()}
    arguments = {"prompt_lookup_num_tokens": 5, "tokens": 12}
    expected = greedy(model, inputs, DynamicCache(config=model.config), **arguments)
    assert torch.equal(greedy(model, inputs, open_cache(model), **arguments), expected)


def test_assistant_model(model, open_cache):
    # Another model: most of what it proposes is wrong and cropped away.
    assistant = tiny_model("llama", seed=3)
    inputs = prompt(1, 20)
    expected = greedy(model, inputs)
    actual = greedy(model, inputs, open_cache(model), assistant_model=assistant)
    assert torch.equal(actual, expected)


def test_model_as_its_own_assistant(llama, open_cache):
    """All candidates are right, and the assistant has the same attention and another cache."""
    inputs = prompt(1, 20)
    expected = greedy(llama, inputs, tokens=20)
    actual = greedy(llama, inputs, open_cache(llama), tokens=20, assistant_model=llama)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
@pytest.mark.pairs
def test_chunked_prefill(model, open_cache, chunk):
    inputs = prompt(2, 23, padding=(2, 0))
    expected = greedy(model, inputs)
    actual = greedy(model, inputs, open_cache(model), prefill_chunk_size=chunk)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("question", [1, 3, 12], ids=["one", "short", "long"])
@pytest.mark.pairs
def test_turns(model, open_cache, question):
    """The second turn passes everything so far again, as chat programs do."""
    cache, plain = open_cache(model), DynamicCache(config=model.config)
    ids = prompt(2, 18)["input_ids"]
    for turn in range(3):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = greedy(model, inputs, plain, tokens=5)
        actual = greedy(model, inputs, cache, tokens=5)
        assert torch.equal(actual, expected), turn
        assert cache.get_seq_length() == plain.get_seq_length() == actual.shape[1] - 1
        ids = torch.cat([actual, prompt(2, question, seed=10 + turn)["input_ids"]], 1)


def test_turns_with_padding(llama, open_cache):
    cache = open_cache(llama)
    plain = DynamicCache(config=llama.config)
    first = prompt(2, 15, padding=(0, 6))
    follow = prompt(2, 9, seed=4)
    ids, mask = first["input_ids"], first["attention_mask"]
    for _ in range(2):
        inputs = {"input_ids": ids, "attention_mask": mask}
        expected = greedy(llama, inputs, plain, tokens=4)
        actual = greedy(llama, inputs, cache, tokens=4)
        assert torch.equal(actual, expected)
        ids = torch.cat([actual, follow["input_ids"]], 1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


def test_one_document_many_questions(llama, open_cache):
    document = prompt(1, 30)["input_ids"]
    cache = open_cache(llama)
    with torch.no_grad():
        llama(document, past_key_values=cache)
    for seed, length in ((20, 1), (21, 3), (22, 11)):
        ids = torch.cat([document, prompt(1, length, seed=seed)["input_ids"]], 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(greedy(llama, inputs, cache), greedy(llama, inputs))
        cache.crop(document.shape[1] - cache.get_seq_length())
        assert cache.get_seq_length() == 30


def test_reset_and_use_again(model, open_cache):
    cache = open_cache(model)
    for batch, tokens in ((1, 20), (3, 9), (2, 30)):
        inputs = prompt(batch, tokens, seed=tokens)
        assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.is_initialized


def test_driven_as_kvpress_does(model, open_cache):
    """The bare decoder prefills, a question chunk follows with positions, then it is truncated."""
    document, question = prompt(1, 24)["input_ids"], prompt(1, 6, seed=8)["input_ids"]
    answers = []
    for cache in (DynamicCache(config=model.config), open_cache(model)):
        if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
            cache.activate_past_recording()  # as a sliding layer asks before it is cropped
        with torch.no_grad():
            model.model(input_ids=document, past_key_values=cache)
            assert cache.get_seq_length(0) == cache.get_seq_length(1) == 24
            positions = torch.arange(24, 30)[None]
            outputs = model(
                input_ids=question, past_key_values=cache, position_ids=positions, logits_to_keep=1
            )
            ids = [outputs.logits[0, -1].argmax()]
            for position in range(30, 36):
                outputs = model(
                    input_ids=ids[-1].view(1, 1),
                    past_key_values=cache,
                    position_ids=torch.tensor([[position]]),
                )
                ids.append(outputs.logits[0, -1].argmax())
        cache.crop(24 - cache.get_seq_length(0))
        assert cache.get_seq_length(0) == 24
        answers.append(torch.stack(ids))
    assert torch.equal(*answers)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_modes(llama, open_cache, context):
    ids = prompt(1, 20)["input_ids"]
    cache = open_cache(llama)
    with context():
        logits = llama(ids, past_key_values=cache).logits
        more = llama(ids[:, :2], past_key_values=cache).logits
    with torch.no_grad():
        expected = llama(torch.cat([ids, ids[:, :2]], 1)).logits
    torch.testing.assert_close(torch.cat([logits, more], 1).detach(), expected)


def test_inputs_embeds(llama, open_cache):
    inputs = prompt(1, 16)
    embeds = {
        "inputs_embeds": llama.get_input_embeddings()(inputs["input_ids"]).detach(),
        "attention_mask": inputs["attention_mask"],
    }
    assert torch.equal(greedy(llama, embeds, open_cache(llama)), greedy(llama, embeds))


def test_mask_of_ones_or_none(llama, open_cache):
    ids = prompt(2, 17)["input_ids"]
    with torch.no_grad():
        expected = llama(ids).logits
        for mask in (None, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool)):
            logits = llama(ids, attention_mask=mask, past_key_values=open_cache(llama)).logits
            torch.testing.assert_close(logits, expected)


def test_right_padding_and_holes(llama, open_cache):
    """Not what generate() makes, but a mask may say it."""
    ids = prompt(2, 17)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 12:], mask[1, 3:6] = PAD, PAD
    with torch.no_grad():
        expected = llama(ids, attention_mask=mask).logits
        cache = open_cache(llama)
        actual = llama(ids, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_half_precision_error(family, dtype, open_cache):
    """Against fp32, logits are at most twice as wrong as SDPA's own."""
    ids = prompt(2, 40)["input_ids"]
    exact, half = tiny_model(family), tiny_model(family, dtype=dtype)
    cache = open_cache(half)
    with torch.no_grad():
        truth = exact.to(torch.float32)(ids).logits
        theirs = half(ids).logits.float()
        parts = [20, *[4] * 2, *[1] * 12]  # prefill, short chunks, decoding
        ours = [half(part, past_key_values=cache).logits.float() for part in ids.split(parts, 1)]
    error = (torch.cat(ours, 1) - truth).abs().mean()
    assert error <= 2 * (theirs - truth).abs().mean()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_whatever_the_model_used_before(family, implementation, open_cache):
    model = tiny_model(family)
    model.set_attn_implementation(implementation)
    inputs = prompt(2, 20, padding=(4, 0))
    expected = greedy(model, inputs)
    cache = open_cache(model)
    assert torch.equal(greedy(model, inputs, cache), expected)
    assert torch.equal(greedy(model, inputs), expected)  # another cache, while ours is open
    cache.close()
    assert model.config._attn_implementation == implementation


def test_the_cache_comes_back_with_the_output(llama, open_cache):
    cache, inputs = open_cache(llama), prompt(2, 14)
    arguments = {"return_dict_in_generate": True, "output_hidden_states": True}
    outputs = greedy(llama, inputs, cache, output_logits=True, **arguments)
    expected = greedy(llama, inputs, output_logits=True, **arguments)
    assert outputs.past_key_values is cache
    assert torch.equal(outputs.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(outputs.logits), torch.stack(expected.logits))
    # And goes on from there, as from any cache.
    more = {"input_ids": outputs.sequences, "attention_mask": torch.ones_like(outputs.sequences)}
    plain = greedy(llama, more, expected.past_key_values, tokens=5)
    assert torch.equal(greedy(llama, more, outputs.past_key_values, tokens=5), plain)


def test_going_on_from_embeddings(llama, open_cache):
    """A prompt of embeddings, its answer, and more embeddings on top of the same cache."""
    embed = llama.get_input_embeddings()
    first, more = prompt(1, 12)["input_ids"], prompt(1, 5, seed=9)["input_ids"]
    answers = []
    for cache in (DynamicCache(config=llama.config), open_cache(llama)):
        with torch.no_grad():
            llama(inputs_embeds=embed(first), past_key_values=cache)
            both = embed(torch.cat([first, more], 1))
            mask = torch.ones(both.shape[:2], dtype=torch.long)
            inputs = {"inputs_embeds": both, "attention_mask": mask}
            answers.append(greedy(llama, inputs, cache, tokens=6))
    assert torch.equal(*answers)


def test_stopping_early_in_a_batch(llama, open_cache):
    """A finished sequence goes on as padding that the mask calls valid; nobody minds."""
    inputs = prompt(3, 16, padding=(0, 2, 5))
    plain = llama.generate(**inputs, do_sample=False, max_new_tokens=10)
    stop = plain[0, 18].item()  # the first sequence ends with its third token
    arguments = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": stop}
    expected = llama.generate(**inputs, **arguments)
    actual = llama.generate(**inputs, past_key_values=open_cache(llama), **arguments)
    assert torch.equal(actual, expected)


def test_contiguous_and_strided_keys_alike(llama, open_cache):
    """Keys come as views of a projection; a model may also hand over copies."""
    ids = prompt(2, 21)["input_ids"]
    handles = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, a, out: out.clone(
            memory_format=torch.contiguous_format))
        for layer in llama.model.layers
    ]  # fmt: skip
    with torch.no_grad():
        copied = llama(ids, past_key_values=open_cache(llama)).logits
        for handle in handles:
            handle.remove()
        assert torch.equal(llama(ids, past_key_values=open_cache(llama)).logits, copied)
