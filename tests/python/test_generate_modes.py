"""Every mode of `generate()`, family by family: the cache on disk gives what `DynamicCache` does.

What transformers refuses with a `DynamicCache` it must refuse here too, by the same sentence.
`NOT_DONE` says what a family does with no cache, and why. ``KVSWAP_TEST_LONG=1`` (`make test-long`)
takes the other families with latent attention or an index of their own, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tests.how_long import is_long
from tests.python import every_model
from tests.python.narrow_llama import narrow_llama
from tests.python.tiny_models import EOS, VOCABULARY, character_tokenizer, prompt, tiny_model

pytestmark = [
    pytest.mark.parametrize("sessions", ["native"], indirect=True),
    pytest.mark.filterwarnings("ignore"),  # transformers', on sampling options set for one call
]
OF_EVERY = {
    "bamba": "Bamba",
    "deepseek": "DeepseekV3",
    "deepseek32": "DeepseekV32",
    "gpt_bigcode": "GPTBigCode",
    "dbrx": "Dbrx",
    "roberta": "Roberta",
    "modernbert": "ModernBertDecoder",
    "mimo": "MiMoV2Flash",  # values narrower than keys
}
if is_long():
    OF_EVERY |= {
        "deepseek2": "DeepseekV2",
        "mistral4": "Mistral4",
        "minicpm3": "MiniCPM3",
        "kimi_linear": "KimiLinear",
        "bailing": "BailingHybrid",
        "axk1": "AXK1",
        "glm4_lite": "Glm4MoeLite",
        "youtu": "Youtu",
        "longcat": "LongcatFlash",
        "glm_dsa": "GlmMoeDsa",
        "hyv4": "HYV4",
        "axk2": "AXK2",
    }
FAMILIES = ("llama", "qwen3", "gemma3", "narrow llama", *OF_EVERY)
NO_EARLY_EXIT = ("gpt_bigcode", "roberta", "modernbert")  # in transformers, whatever the cache
TOKENS = 7


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest):
    """With its family's name, which `NOT_DONE` asks for."""
    name = request.param
    if name == "narrow llama":
        return name, narrow_llama()
    made = every_model.build(OF_EVERY[name]) if name in OF_EVERY else tiny_model(name)
    return name, made


class Favour(LogitsProcessor):
    """A processor of the user's: each token after an even one is drawn towards multiples of 3."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor):
        drawn = scores.clone()
        drawn[input_ids[:, -1] % 2 == 0, ::3] += 2.0
        return drawn


class After(StoppingCriteria):
    """Stops every sequence at a length of its own."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any):
        ends = self.length + torch.arange(input_ids.shape[0])
        return ends <= input_ids.shape[1]


def next_words(batch: int, ids: torch.Tensor) -> list[int]:
    """The tokens allowed after `ids`: three that depend on the last one."""
    last = int(ids[-1])
    return [3 + (last + step) % (VOCABULARY - 3) for step in (1, 7, 20)]


def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A decoding of the user's: the second best token, by generate()'s own preparations."""
    for step in range(4):
        newest = 1 if step else None
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=newest, is_first_iteration=step == 0, **kwargs
        )
        outputs = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        second = outputs.logits[:, -1].topk(2).indices[:, 1:]
        input_ids = torch.cat([input_ids, second], 1)
    return input_ids


SAMPLE = {"do_sample": True}
BEAMS = {"num_beams": 3}
# What generate() is asked for, beside two sequences of which the second begins with padding.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": SAMPLE,
    "sample, temperature": SAMPLE | {"temperature": 0.7},
    "sample, top_k": SAMPLE | {"top_k": 5},
    "sample, top_p": SAMPLE | {"top_p": 0.6},
    "sample, min_p": SAMPLE | {"min_p": 0.1},
    "sample, top_h": SAMPLE | {"top_h": 0.4},
    "sample, typical_p": SAMPLE | {"typical_p": 0.5},
    "sample, cutoffs": SAMPLE | {"epsilon_cutoff": 3e-3, "eta_cutoff": 3e-3},
    "sample, sequences": SAMPLE | {"num_return_sequences": 3},
    "beams": BEAMS,
    "beams, sequences": BEAMS | {"num_return_sequences": 2},
    "beams, early stopping": BEAMS | {"early_stopping": True, "eos_token_id": [EOS, 5, 17]},
    "beams, never early": BEAMS | {"early_stopping": "never", "length_penalty": 2.0},
    "beams, sampled": BEAMS | SAMPLE | {"num_return_sequences": 2},
    "beams, constrained by a function": BEAMS | {"prefix_allowed_tokens_fn": next_words},
    "constrained by a function": {"prefix_allowed_tokens_fn": next_words},
    "repetition penalty": {"repetition_penalty": 1.7},
    "encoder repetition penalty": {"encoder_repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[i] for i in range(3, 60)] + [[61, 70]]},
    "sequence bias": {"sequence_bias": [[[7], 4.0], [[7, 11], 9.0]]},
    "suppressed": {"suppress_tokens": [*range(40, 97)], "begin_suppress_tokens": [*range(20)]},
    "forced ends": {"forced_eos_token_id": 9},
    "exponential decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 5},
    "least length": {"min_length": 24, "eos_token_id": [*range(3, 90)]},
    "least new tokens": {"min_new_tokens": 5, "eos_token_id": [*range(3, 90)]},
    "several ends": {"eos_token_id": [*range(3, 97, 4)]},
    "renormalised": SAMPLE | {"renormalize_logits": True, "remove_invalid_values": True},
    "guidance": {"guidance_scale": 1.6},
    "watermark": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "lefthash"}},
    "a processor of one's own": {"logits_processor": LogitsProcessorList([Favour()])},
    "a criterion of one's own": {"stopping_criteria": StoppingCriteriaList([After(20)])},
    "most time": {"max_time": 1000.0},
    "a string that stops": {"stop_strings": ["*K", "5D", "i"]},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "prompt lookup, n-grams": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
    "prompt lookup, sampled": SAMPLE | {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "compiled": {"compile_config": transformers.CompileConfig(mode="reduce-overhead")},
    "not compiled": {"disable_compile": True},
    "a decoding of one's own": {"custom_generate": own_loop},
}
# What a family does with no cache, and the words of transformers that say why.
_STATES = "not supported with stateful models"
_EMBEDDINGS = "doesn't have its forwarding implemented"
HYBRIDS = ("bamba", "kimi_linear", "bailing")
NOT_DONE = {
    ("bamba", "embeddings"): _EMBEDDINGS,
    ("bamba", "embeddings and ids"): _EMBEDDINGS,
} | {
    (family, mode): _STATES
    for family in HYBRIDS
    for mode in ("prompt lookup", "prompt lookup, n-grams", "prompt lookup, sampled", "early exit")
}


def run(model: Any, mode: dict[str, Any], cache: Any, inputs: dict) -> Any:
    """What generate() gives, or what it raises before anything is computed."""
    arguments = {"do_sample": False, "max_new_tokens": TOKENS} | mode
    if "stop_strings" in mode:
        arguments["tokenizer"] = character_tokenizer()
    torch.manual_seed(11)
    try:
        return model.generate(**inputs, past_key_values=cache, **arguments)
    except (ValueError, NotImplementedError) as error:
        return type(error), str(error)


def one_sequence(mode: dict[str, Any]) -> bool:
    return bool(mode.keys() & {"prompt_lookup_num_tokens", "assistant_early_exit"})


def compare(family: str, name: str, actual: Any, expected: Any) -> None:
    """Equal tokens; or the refusal that `NOT_DONE` has."""
    if why := NOT_DONE.get((family, name)):
        assert isinstance(expected, tuple) and why in expected[1] and actual == expected
    else:
        assert torch.is_tensor(expected), expected
        assert torch.is_tensor(actual) and torch.equal(actual, expected), actual


@pytest.mark.parametrize("name", list(MODES))
def test_as_dynamic_cache(name, model, open_cache):
    family, model = model
    mode = MODES[name]
    if name == "early exit" and family in NO_EARLY_EXIT:
        model = copy.deepcopy(model)  # which is left with fewer layers
        with pytest.raises(IndexError):
            run(model, mode, DynamicCache(config=model.config), prompt(1, 8))
        return
    inputs = prompt(1, 8) if one_sequence(mode) else prompt(2, 17, padding=(0, 4))
    expected = run(model, mode, DynamicCache(config=model.config), dict(inputs))
    compare(family, name, run(model, mode, open_cache(model), dict(inputs)), expected)


# What is returned beside the tokens.

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,  # of none but eager attention has transformers any
}
EAGER = ("hyv4", "mimo")
MEANS_OF_PADDING = ("mimo",)  # are its hidden states of padding: they mean nothing


@pytest.mark.parametrize(
    "mode", [{}, SAMPLE, BEAMS, BEAMS | SAMPLE], ids=["greedy", "sample", "beams", "beams, sampled"]
)
def test_everything_returned(mode, model, open_cache):
    family, model = model
    padding = () if family in MEANS_OF_PADDING else (0, 4)
    inputs, mode = prompt(2, 17, padding=padding), mode | EVERYTHING
    if family in EAGER:
        kind, told = run(model, mode, open_cache(model), inputs)
        assert kind is ValueError and "output_attentions must be false" in told
        mode |= {"output_attentions": False}
    cache = open_cache(model)
    expected = run(model, mode, DynamicCache(config=model.config), inputs)
    actual = run(model, mode, cache, inputs)
    assert actual.past_key_values is cache and type(actual) is type(expected)
    assert actual.keys() == expected.keys()
    for name in expected.keys() - {"past_key_values", "cache"}:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)


class Words:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], False

    def put(self, ids: torch.Tensor) -> None:
        self.given += ids.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamed(model, open_cache):
    _, model = model
    inputs, streamer = prompt(1, 17), Words()
    actual = run(model, {"streamer": streamer}, open_cache(model), inputs)
    assert torch.equal(actual, run(model, {}, DynamicCache(config=model.config), inputs))
    assert streamer.ended and streamer.given == actual[0].tolist()


# How a prompt may come.


def embeddings(model: Any, inputs: dict) -> torch.Tensor:
    return model.get_input_embeddings()(inputs["input_ids"]).detach()


def masked(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, dict], dict]:
    """The prompt with its mask changed."""
    return lambda model, inputs: inputs | {"attention_mask": change(inputs["attention_mask"])}


FORMS: dict[str, Callable[[Any, dict], dict]] = {
    "ids alone": lambda model, inputs: {"inputs": inputs["input_ids"]},
    "a mask of bools": masked(torch.Tensor.bool),
    "a mask of floats": masked(torch.Tensor.float),
    "positions": lambda model, inputs: (
        inputs | {"position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    ),
    "embeddings": lambda model, inputs: (
        {"inputs_embeds": embeddings(model, inputs), "attention_mask": inputs["attention_mask"]}
    ),
    "embeddings and ids": lambda model, inputs: (
        inputs | {"inputs_embeds": embeddings(model, inputs)}
    ),
    "nothing": lambda model, inputs: {},
    "all logits": lambda model, inputs: inputs | {"logits_to_keep": 0},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_form_of_the_prompt(form, model, open_cache):
    family, model = model
    inputs = FORMS[form](model, prompt(2, 17, padding=() if form == "ids alone" else (0, 4)))
    expected = run(model, {}, DynamicCache(config=model.config), dict(inputs))
    compare(family, form, run(model, {}, open_cache(model), dict(inputs)), expected)


# Going on from a cache that has been used.


@pytest.mark.parametrize("mode", [{}, SAMPLE, BEAMS], ids=["greedy", "sample", "beams"])
def test_going_on(mode, model, open_cache):
    """The tokens so far and some more, with the cache of a first call."""
    family, model = model
    if family in HYBRIDS and mode is BEAMS:
        pytest.skip("transformers' layers of linear attention cannot repeat a batch for beams")
    inputs, more = prompt(2, 17, padding=(0, 4)), prompt(2, 5, seed=6)["input_ids"]
    answers = []
    for cache in (DynamicCache(config=model.config), open_cache(model)):
        first = run(model, {"return_dict_in_generate": True, "eos_token_id": 96}, cache, inputs)
        assert first.past_key_values is cache
        ids = torch.cat([first.sequences, more], 1)
        mask = torch.ones_like(ids)
        mask[:, :17] = inputs["attention_mask"]
        if mode is BEAMS:
            cache.batch_repeat_interleave(BEAMS["num_beams"])
        answers.append(run(model, mode, cache, {"input_ids": ids, "attention_mask": mask}))
    assert torch.equal(*answers)


# What transformers refuses beside a cache of the user's, and what it has moved out.

REFUSED: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "quantized": {"cache_implementation": "quantized"},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "layers contrasted": {"dola_layers": "low"},
    "groups of beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "words that must come": {"num_beams": 4, "force_words_ids": [[7, 9]]},
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_as_with_dynamic_cache(name, llama, open_cache):
    inputs = prompt(1, 12)
    expected = run(llama, REFUSED[name], DynamicCache(config=llama.config), inputs)
    assert isinstance(expected, tuple), "transformers refuses it no more: it belongs to MODES"
    cache = open_cache(llama)
    assert run(llama, REFUSED[name], cache, inputs) == expected
    assert torch.equal(run(llama, {}, cache, inputs), run(llama, {}, None, inputs))


def test_a_cache_that_must_not_be_used(llama, open_cache):
    """`DynamicCache` takes every token once more at every step, and other tokens come."""
    inputs = prompt(2, 17, padding=(0, 4))
    with pytest.raises(ValueError, match="17 positions in the cache and the 18 new ones"):
        llama.generate(**inputs, past_key_values=open_cache(llama), use_cache=False)
