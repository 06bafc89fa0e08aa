"""lm-evaluation-harness over the cache, by a stand-in of what version 0.4.13 shows of itself.

docs/integrations.md says what was run with the harness itself.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch

from kvswap_torch import KVSwapCache
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

NAME = "kvswap_torch.integrations.lm_eval"
HARNESS = "lm_eval.models.huggingface"
NEW_TOKENS = 6
MAX_LENGTH = 48

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


class HFLM:
    """The harness' model of transformers, as far as the adapter sees it."""

    max_length = MAX_LENGTH
    prefix_token_id = 3

    def __init__(self, pretrained: Any, device: str):
        self.model, self.device = pretrained, device
        self.cached: list[tuple[str, Any, Any]] = []
        self.cache_hook = types.SimpleNamespace(
            add_partial=lambda *partial: self.cached.append(partial)
        )

    def _model_generate(self, context, max_length, stop, **arguments):
        return self.model.generate(
            input_ids=context, max_length=max_length, do_sample=False, **arguments
        )


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Any:
    """The adapter, and the models that it has registered."""
    models: dict[str, type] = {}
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.registry", "lm_eval.models", HARNESS)
    modules = {name: types.ModuleType(name) for name in names}
    modules["lm_eval.api.registry"].register_model = lambda name: (
        lambda kind: models.setdefault(name, kind)
    )
    modules[HARNESS].HFLM = HFLM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    for module in ("dynamic_module_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    importlib.import_module(NAME)
    yield models
    sys.modules.pop(NAME, None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With what each cache was opened."""
    seen: list[dict[str, Any]] = []
    begin = KVSwapCache.__init__

    def noted(self, model, path, config=None, memory=None, context=None, **arguments):
        settings = {"config": config, "kv_memory_bytes": memory, "max_context": context} | arguments
        seen.append({name: value for name, value in settings.items() if value is not None})
        begin(self, model, path, **settings)

    monkeypatch.setattr(KVSwapCache, "__init__", noted)
    return seen


def test_an_answer_is_generated_over_a_cache(door, opened, tmp_path) -> None:
    model, ids = tiny_model("llama"), prompt(1, 30)["input_ids"]
    model.generation_config.eos_token_id = None
    folder = tmp_path / "kv"
    folder.mkdir()
    lm = door["kvswap"](model, kv_path=str(folder), kv_memory_bytes="2MiB")
    told = lm._model_generate(ids, 30 + NEW_TOKENS, [])
    assert torch.equal(told, greedy(model, {"input_ids": ids}, None, NEW_TOKENS))
    assert opened == [{"kv_memory_bytes": "2MiB", "max_context": 30 + NEW_TOKENS}]
    assert list(folder.iterdir()) == [] and lm.device == "cpu"


@pytest.mark.parametrize(("count", "read"), [
    (30, 30), (60, MAX_LENGTH + 1 - NEW_TOKENS), (0, 1),
], ids=["all of it", "as much as fits", "none"])  # fmt: skip
def test_a_continuation_is_as_likely_as_in_one_exact_pass(
    count, read, door, opened, tmp_path
) -> None:
    """After as much of the context as the harness would read, or its first token."""
    model = tiny_model("llama")
    context = prompt(1, count)["input_ids"][0].tolist() if count else []
    continuation = prompt(1, NEW_TOKENS, seed=5)["input_ids"][0].tolist()
    lm = door["kvswap"](model, kv_path=str(tmp_path), kv_memory_bytes="2MiB")
    ((told, is_greedy),) = lm._loglikelihood_tokens([(("a", "b"), context, continuation)])
    whole = (context or [lm.prefix_token_id])[-read:] + continuation
    logits = model(input_ids=torch.tensor([whole])).logits[0, read - 1 : -1].float()
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()
    assert told == pytest.approx(wanted.item(), abs=1e-4)
    assert is_greedy is bool((logits.argmax(-1) == torch.tensor(continuation)).all())
    assert lm.cached == [("loglikelihood", ("a", "b"), (told, is_greedy))]
    assert opened == [{"kv_memory_bytes": "2MiB", "max_context": read + NEW_TOKENS}]
