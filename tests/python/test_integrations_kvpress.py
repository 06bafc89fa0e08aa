"""kvpress' evaluation over the cache, by a stand-in of what version 0.5.5 shows of itself.

docs/integrations.md says what was run with kvpress itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from kvswap_torch import KVSwapCache
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.errors import ConfigError
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

NAME = "kvswap_torch.integrations.kvpress"
NEW_TOKENS = 6

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


class Pipeline:
    """Reads a context without the output layer, then answers questions after it, one by one."""

    def __init__(self, model: Any):
        self.model = model

    def _forward(self, input_tensors, max_new_tokens=50, press=None, cache=None):
        context = input_tensors["context_ids"]
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        self.model.model(input_ids=context, **cache_argument(self.model, cache))
        told = []
        for ids in input_tensors["questions_ids"]:
            before = [cache.get_seq_length(layer) for layer in range(len(cache))]
            told.append(self.generate_answer(ids, cache, context.shape[1], max_new_tokens))
            self._remove_answer_from_cache(cache, before)
        return told

    def generate_answer(self, question_ids, cache, context_length, max_new_tokens):
        place = torch.arange(context_length, context_length + question_ids.shape[1])[None]
        said, ids = [], question_ids
        for _ in range(max_new_tokens):
            named = cache_argument(self.model, cache)
            told = self.model(input_ids=ids, position_ids=place, logits_to_keep=1, **named)
            ids, place = told.logits[:, -1].argmax(-1, keepdim=True), place[:, -1:] + 1
            said.append(int(ids))
        return said


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Any:
    stub = types.ModuleType("kvpress.pipeline")
    stub.KVPressTextGenerationPipeline = Pipeline
    stub.PIPELINE_REGISTRY = transformers.pipelines.PIPELINE_REGISTRY
    stub.AutoModelForCausalLM = transformers.AutoModelForCausalLM
    monkeypatch.setitem(sys.modules, "kvpress", types.ModuleType("kvpress"))
    monkeypatch.setitem(sys.modules, "kvpress.pipeline", stub)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    tasks = dict(stub.PIPELINE_REGISTRY.supported_tasks)
    yield importlib.import_module(NAME)
    stub.PIPELINE_REGISTRY.supported_tasks = tasks
    sys.modules.pop(NAME, None)


def asked(model: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """A context with two questions, and what the full cache says to each."""
    context = prompt(1, 90)["input_ids"]
    questions = [prompt(1, count, seed=count)["input_ids"] for count in (9, 1)]
    wanted = []
    for ids in questions:
        whole = torch.cat([context, ids], 1)
        told = greedy(model, {"input_ids": whole}, None, NEW_TOKENS)
        wanted.append(told[0, whole.shape[1] :].tolist())
    return {"context_ids": context, "questions_ids": questions}, wanted


def test_its_answers_are_the_full_caches_and_a_question_leaves_nothing(door, tmp_path) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    tensors, wanted = asked(model)
    passes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    door.use_cache(kv_path=str(tmp_path), preset="quest")
    assert door.KVSwapPipeline(model)._forward(tensors, NEW_TOKENS) == wanted
    # A question is decoded: no pass of the whole model has more than one token.
    assert set(passes) == {1} and len(passes) == 9 + 1 + 2 * (NEW_TOKENS - 1)
    assert list(tmp_path.iterdir()) == []


def test_the_caches_options_are_the_caches(door, tmp_path, monkeypatch) -> None:
    opened: list[dict[str, Any]] = []
    begin = KVSwapCache.__init__

    def noted(self, model, path, **arguments):
        opened.append({"path": path} | arguments)
        begin(self, model, path, **arguments)

    monkeypatch.setattr(KVSwapCache, "__init__", noted)
    door.use_cache(kv_path=str(tmp_path), kv_memory_bytes="2MiB")
    model = tiny_model("llama")
    door.KVSwapPipeline(model)._forward(asked(model)[0], NEW_TOKENS)
    context = 90 + 9 + NEW_TOKENS
    told = {"path": str(tmp_path), "kv_memory_bytes": "2MiB", "max_context": context}
    assert opened == [told]
    task = transformers.pipelines.PIPELINE_REGISTRY.supported_tasks[door.TASK]
    assert task["impl"] is door.KVSwapPipeline


@pytest.mark.parametrize("name", ["press", "cache"])
def test_a_press_or_a_cache_beside_it_is_refused(name, door) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=f"kvpress: {name} must not be given"):
        door.KVSwapPipeline(model)._forward(asked(model)[0], **{name: object()})


def test_its_script_is_run_with_its_own_options(door, tmp_path) -> None:
    script = tmp_path / "evaluate.py"
    script.write_text("import beside, sys; beside.seen = sys.argv[1:], __name__")
    (tmp_path / "beside.py").write_text("seen = None")
    door.main([str(tmp_path), "--preset=quest", "--dataset=ruler", "--fraction", "0.5"])
    seen = sys.modules.pop("beside").seen
    assert seen == (["--dataset=ruler", "--fraction", "0.5", "--press_name=no_press"], "__main__")
    assert door.KVSwapPipeline.kv == {"kv_path": ".", "preset": "quest"}


def test_a_press_by_name_and_a_folder_without_the_script_are_refused(door, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"must be the folder of evaluate.py"):
        door.main([str(tmp_path)])
    Path(tmp_path / "evaluate.py").write_text("raise SystemExit(1)")
    with pytest.raises(ConfigError, match=r"press_name must be no_press.*got knorm; take --preset"):
        door.main([str(tmp_path), "--press_name", "knorm"])


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is not None, reason="kvpress is here")
def test_without_kvpress_its_name_is_said() -> None:
    with pytest.raises(ImportError, match="kvpress must be installed, and is not; run: pip"):
        importlib.import_module(NAME)
