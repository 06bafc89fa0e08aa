"""Models whose weights accelerate keeps on disk between calls: the tokens of the same in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvswap_torch import ConfigError, KVSwapCache, UnsupportedModelError
from kvswap_torch.cli.conversation import Conversation
from kvswap_torch.cli.prompt import PLAIN, make_prompt
from kvswap_torch.hf.families import input_device, model_parts
from kvswap_torch.hf.offloaded import StoredTensors
from kvswap_torch.hf.weights_digest import weights_of
from kvswap_torch.integrations.scoring import score
from tests.python import every_model
from tests.python.saved_conversation import filled, goes_on
from tests.python.tiny_models import (
    COVERING,
    TIGHT,
    character_tokenizer,
    ctrl_c,
    forward,
    greedy,
    has_native,
    prompt,
    tiny_model,
)

pytest.importorskip("accelerate", reason="weights on disk are accelerate's")
pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]

FAMILIES = ["llama", "gemma3", "qwen3"]


def on_disk(model: Any, folder: Path, dtype: Any = "auto") -> Any:
    """The same weights, of which the last norm's alone stay in memory."""
    model.save_pretrained(folder)
    tops = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    tops += [f"model.layers.{i}" for i in range(len(model.model.layers))] + ["lm_head"]
    places = {top: "cpu" if top == "model.norm" else "disk" for top in tops}
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=folder / "offloaded", dtype=dtype
    ).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in memory, and the same with every layer on disk."""
    model = tiny_model(request.param)
    return model, on_disk(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("padding", [(), (0, 5)], ids=["even", "left-padded"])
def test_a_covering_budget_gives_the_tokens_of_a_cache_in_memory(pair, padding, tmp_path) -> None:
    model, offloaded = pair
    assert StoredTensors(offloaded) and not StoredTensors(model)
    inputs = prompt(2, 20, padding=padding)
    expected = greedy(model, inputs)
    with KVSwapCache(offloaded, tmp_path, config=COVERING) as cache:
        assert torch.equal(greedy(offloaded, inputs, cache), expected)


@pytest.mark.parametrize("mode", ["off", "verify", "trust"])
def test_a_tight_budget_gives_the_tokens_of_the_model_in_memory(pair, mode, tmp_path) -> None:
    inputs = prompt(2, 40)
    config = TIGHT.with_settings({"prefetch.mode": mode})
    found = []
    for model in pair:
        with KVSwapCache(model, tmp_path, config=config) as cache:
            found.append(greedy(model, inputs, cache, tokens=16))
            assert cache.stats().groups_per_step > 0
    assert torch.equal(*found)


def away(model: Any) -> bool:
    """Whether nothing that came for a call is still there."""
    return all(model.get_parameter(name).is_meta for name in stored_names(model))


def stored_names(model: Any) -> list[str]:
    names = {name for name, _ in model.named_parameters()}
    return [name for name in StoredTensors(model) if name in names]


@pytest.mark.parametrize("mode", ["verify", "trust"])
def test_a_prediction_leaves_no_weights_behind(mode, tmp_path) -> None:
    """gpt-oss has sinks on the attention module itself, whose forward a prediction cuts short."""
    model = every_model.build("GptOss")
    folder = tmp_path / "model"
    inputs, config = prompt(2, 40), TIGHT.with_settings({"prefetch.mode": mode})
    with KVSwapCache(model, tmp_path, config=config) as cache:
        expected = greedy(model, inputs, cache)
    offloaded = on_disk(model, folder)
    layers, seen = offloaded.model.layers, set()
    target = model_parts(offloaded).disk[-1]  # whose query the layer before it predicts
    sinks = layers[target].self_attn
    with KVSwapCache(offloaded, tmp_path, config=config) as cache:
        sinks.register_forward_pre_hook(lambda *_: seen.add(sinks.sinks.is_meta))
        assert torch.equal(greedy(offloaded, inputs, cache), expected)
        assert cache.stats().groups_per_step > 0
    assert seen == {True} and away(offloaded)


@pytest.mark.parametrize("config", [COVERING, TIGHT], ids=["covering", "tight"])
def test_latent_attention_expands_by_weights_that_come_and_go(config, tmp_path) -> None:
    model = every_model.build("DeepseekV3")
    inputs = prompt(2, 40)
    with KVSwapCache(model, tmp_path, config=config) as cache:
        expected = greedy(model, inputs, cache)
    offloaded = on_disk(model, tmp_path / "model")
    with KVSwapCache(offloaded, tmp_path, config=config) as cache:
        assert torch.equal(greedy(offloaded, inputs, cache), expected)
    assert away(offloaded)


def test_weights_that_are_kept_in_memory_for_a_device_come_and_go_too(tmp_path) -> None:
    from accelerate import cpu_offload

    model, inputs = tiny_model("llama"), prompt(2, 20)
    expected = greedy(model, inputs)
    offloaded = cpu_offload(model, execution_device="cpu")
    with KVSwapCache(offloaded, tmp_path, config=COVERING) as cache:
        assert torch.equal(greedy(offloaded, inputs, cache), expected)


def test_attention_on_two_devices_is_refused(tmp_path) -> None:
    from accelerate import cpu_offload

    model = tiny_model("llama")
    cpu_offload(model.model.layers[1], execution_device="meta")
    with pytest.raises(UnsupportedModelError, match="is on cpu, meta; all of it must be"):
        KVSwapCache(model, tmp_path, config=COVERING)


def test_a_prompt_in_chunks(pair, tmp_path) -> None:
    inputs, found = prompt(2, 60), []
    for model in pair:
        with KVSwapCache(model, tmp_path, config=TIGHT) as cache:
            found.append(greedy(model, inputs, cache, prefill_chunk_size=16))
    assert torch.equal(*found)


def test_a_fork_goes_on_alike(pair, tmp_path) -> None:
    found = []
    for model in pair:
        cache, out = filled(model, tmp_path)
        with cache, cache.fork() as fork:
            found += [goes_on(model, cache, out), goes_on(model, fork, out)]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("saver", [0, 1], ids=["from memory", "from disk"])
def test_what_one_saves_the_other_opens(pair, saver, tmp_path) -> None:
    model, other = pair[saver], pair[1 - saver]
    cache, out = filled(model, tmp_path)
    with cache:
        cache.save(tmp_path / "saved")
        expected = goes_on(model, cache, out)
    with KVSwapCache.open(other, tmp_path / "saved", path=tmp_path) as opened:
        assert goes_on(other, opened, out) == expected


def test_digests_are_of_the_weights_on_disk(pair) -> None:
    model, offloaded = (weights_of(model_parts(each)).tensors for each in pair)
    assert model == offloaded and None not in offloaded.values()


def test_another_models_saved_cache_is_refused(tmp_path) -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=5)
    cache, _ = filled(model, tmp_path)
    with cache:
        cache.save(tmp_path / "saved")
    offloaded = on_disk(other, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"of its weights (is|are) not"):
        KVSwapCache.open(offloaded, tmp_path / "saved", path=tmp_path)


def test_an_interrupted_pass_is_taken_back(pair, tmp_path) -> None:
    model, offloaded = pair
    ids = prompt(1, 24)["input_ids"]
    with KVSwapCache(model, tmp_path, config=TIGHT) as cache:
        expected = [forward(model, part, cache) for part in (ids[:, :20], ids[:, 20:])]
    with KVSwapCache(offloaded, tmp_path, config=TIGHT) as cache:
        assert torch.equal(forward(offloaded, ids[:, :20], cache), expected[0])
        with ctrl_c(offloaded.model.layers[1].mlp):
            forward(offloaded, ids[:, 20:], cache)
        assert torch.equal(forward(offloaded, ids[:, 20:], cache), expected[1])


def test_tokens_go_where_the_model_computes(pair) -> None:
    """Its first parameter, the embedding, is on the meta device between calls."""
    model, offloaded = pair
    assert offloaded.device == torch.device("meta")
    assert input_device(offloaded) == input_device(model) == torch.device("cpu")


def test_a_conversation_with_an_embedding_on_disk(pair, tmp_path) -> None:
    tokenizer, answers = character_tokenizer(), []
    for model in pair:
        with KVSwapCache(model, tmp_path, config=COVERING) as cache:
            talk = Conversation(model, tokenizer, cache, make_prompt(PLAIN, tokenizer))
            talk.read(prompt(1, 30)["input_ids"][0].tolist(), 16, lambda tokens: None)
            turns = [talk.ask(text, 6, lambda text: None) for text in ("Who?", "When?")]
            answers.append([turn.answer_ids for turn in turns])
    assert answers[0] == answers[1] and all(answers[0])


def test_scores_with_an_embedding_on_disk(pair, tmp_path) -> None:
    found, ids = [], prompt(1, 30)["input_ids"][0].tolist()
    for model in pair:
        with KVSwapCache(model, tmp_path, config=COVERING) as cache:
            found.append(score(model, cache, ids[:24], ids[24:]))
    (told, is_greedy), other = found
    assert other == (pytest.approx(told, rel=1e-5), is_greedy)


def test_a_device_map_that_leaves_nothing_in_memory(tmp_path) -> None:
    """On disk it works; on the meta device there are no weights at all."""
    model, inputs = tiny_model("llama"), prompt(1, 20)
    model.save_pretrained(tmp_path / "model")
    named = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offloaded"}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **named)
    with KVSwapCache(offloaded, tmp_path, config=COVERING) as cache:
        assert torch.equal(greedy(offloaded, inputs, cache), greedy(model, inputs))
    empty = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="meta")
    with pytest.raises(UnsupportedModelError, match="has no weights.* device_map=None, or its lay"):
        KVSwapCache(empty, tmp_path)
