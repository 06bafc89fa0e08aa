"""Doors from other programs: ``custom_generate=``, a pipeline, PEFT, lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

from kvswap_torch import KVSwapCache, UnsupportedModelError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.integrations import generate_folder
from kvswap_torch.integrations.generating import expected_tokens, generate
from kvswap_torch.integrations.scoring import score
from tests.python.tiny_models import (
    COVERING,
    character_tokenizer,
    greedy,
    has_native,
    prompt,
    tiny_model,
)

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(autouse=True)
def own_module_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """transformers copies a folder's code to where all its users' is."""
    for module in ("dynamic_module_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_generate_opens_a_cache_by_itself(tmp_path) -> None:
    model, inputs = tiny_model("llama"), prompt(2, 24, padding=(0, 5))
    opened: list[KVSwapCache] = []
    seen = KVSwapCache.as_argument

    def as_argument(self):
        opened.append(self)
        return seen(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVSwapCache, "as_argument", as_argument)
        told = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, custom_generate=generate_folder(),
            trust_remote_code=True, kv_path=str(tmp_path), config=COVERING,
        )  # fmt: skip
    assert len(opened) == 1 and opened[0].closed
    assert list(tmp_path.iterdir()) == [tmp_path / "modules"]
    assert torch.equal(told, greedy(model, inputs, DynamicCache(config=model.config)))


def test_without_the_users_word_no_code_of_a_folder_is_run(tmp_path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny_model("llama").generate(
            **prompt(1, 8), custom_generate=generate_folder(), trust_remote_code=False
        )


def test_what_is_returned_as_a_dict_has_no_closed_cache(tmp_path) -> None:
    model, inputs = tiny_model("llama"), prompt(1, 24)
    asked = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    told = generate(model, **inputs, **asked, kv_path=str(tmp_path), config=COVERING)
    assert told.sequences.shape[1] == 32
    assert getattr(told, "past_key_values", None) is None
    assert getattr(told, "cache", None) is None


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_beside_it_is_refused(name, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"{name} must not be given, since this opens a cache"):
        generate(tiny_model("llama"), kv_path=str(tmp_path), **prompt(1, 8), **{name: object()})


def test_a_budget_is_divided_for_the_prompt_and_its_answer(tmp_path) -> None:
    model, inputs = tiny_model("llama"), prompt(1, 60)
    told = generate(
        model, **inputs, max_new_tokens=9, do_sample=False, kv_path=str(tmp_path),
        kv_memory_bytes="1MiB",
    )  # fmt: skip
    assert told.shape[1] == 69
    config = transformers.GenerationConfig(max_length=100)
    for arguments, expected in (
        ({"max_new_tokens": 9}, 69),
        ({"max_length": 80}, 80),
        ({"generation_config": transformers.GenerationConfig(max_new_tokens=7)}, 67),
        ({"generation_config": config}, 100),
        ({"max_length": 80, "generation_config": config}, 80),
    ):
        assert expected_tokens(model, inputs | arguments) == expected
    assert expected_tokens(model, {"inputs_embeds": torch.zeros(1, 3, 4)}) is None


def test_a_pipeline_hands_it_on(tmp_path) -> None:
    model, tokenizer = tiny_model("llama"), character_tokenizer()
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    expected = pipe("how many?", **asked)
    told = pipe(
        "how many?", **asked, custom_generate=generate_folder(), trust_remote_code=True,
        kv_path=str(tmp_path), config=COVERING,
    )  # fmt: skip
    assert told == expected


class Wrapped(nn.Module):
    """PEFT's wrapper, as far as it is seen from here."""

    def __init__(self, model: nn.Module, kind: object):
        super().__init__()
        self.model, self.active_peft_config = model, types.SimpleNamespace(peft_type=kind)

    def get_base_model(self) -> nn.Module:
        return self.model


class Kind(str):
    """An enumeration's member that is a string, as PEFT's are."""

    @property
    def value(self) -> str:
        return str(self)


def test_prefix_tuning_is_refused_by_name_and_lora_is_not() -> None:
    model = tiny_model("llama")
    assert model_parts(Wrapped(model, Kind("LORA"))).outermost is model
    assert model_parts(Wrapped(model, Kind("PROMPT_TUNING"))).outermost is model
    for kind in ("PREFIX_TUNING", "CARTRIDGE"):
        with pytest.raises(UnsupportedModelError) as refused:
            model_parts(Wrapped(model, Kind(kind)))
        assert "LlamaForCausalLM has an adapter of PEFT's kind " + kind in str(refused.value)


def test_a_continuation_is_scored_as_by_one_exact_pass(tmp_path) -> None:
    model, ids = tiny_model("llama"), prompt(1, 40)["input_ids"]
    best = greedy(model, {"input_ids": ids})[0, 40:46].tolist()
    context = ids[0].tolist()
    for continuation, is_greedy in ((best, True), (best[:1], True), ([*best[:3], 1, 2], False)):
        both = torch.tensor([context + continuation])
        logits = model(input_ids=both).logits[0, 39:-1].float().log_softmax(-1)
        expected = logits.gather(1, torch.tensor(continuation)[:, None]).sum().item()
        with KVSwapCache(model, tmp_path, COVERING) as cache:
            told, same = score(model, cache, context, continuation)
            assert cache.get_seq_length() == 40 + len(continuation) - 1
        assert told == pytest.approx(expected, abs=1e-4) and same is is_greedy


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is not None, reason="lm-evaluation-harness is here"
)
def test_without_the_harness_its_name_is_said() -> None:
    with pytest.raises(ImportError, match=r"must be installed, and is not; run: pip install"):
        importlib.import_module("kvswap_torch.integrations.lm_eval")
