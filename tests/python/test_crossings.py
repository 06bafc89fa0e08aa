"""How often a decoding step goes from Python to C++."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

from kvswap_torch import KVSwapCache
from kvswap_torch.hf.lookahead import LookAhead
from tests.python.tiny_models import TIGHT, forward, prompt, tiny_model


class Counted:
    """An object whose calls are counted by name."""

    def __init__(self, inner: Any, calls: collections.Counter[str]):
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        return getattr(self._inner, name)


def calls_of_a_step(layers: int, folder: Path, monkeypatch: Any) -> collections.Counter[str]:
    calls: collections.Counter[str] = collections.Counter()
    predict = LookAhead.predict

    def counting(self: LookAhead, *arguments: Any) -> Any:
        calls["predict"] += 1
        return predict(self, *arguments)

    model = tiny_model("llama", num_hidden_layers=layers)
    config = dataclasses.replace(TIGHT, look_ahead=True)
    with KVSwapCache(model, path=folder, config=config) as cache, monkeypatch.context() as patched:
        ids = prompt(2, 60)["input_ids"]
        forward(model, ids, cache)
        forward(model, ids[:, :1], cache)
        patched.setattr(LookAhead, "predict", counting)
        session = cache.driver.session
        cache.driver.session = Counted(session, calls)
        forward(model, ids[:, :1], cache)
        cache.driver.session = session
    return calls


def test_a_layer_crosses_at_most_four_times_a_step(tmp_path, monkeypatch):
    few, many = (calls_of_a_step(layers, tmp_path, monkeypatch) for layers in (3, 7))
    assert many["extend"] == 7 and many["look_ahead"] == many["predict"] == 6  # it is all counted
    assert many.total() - few.total() <= 4 * 4, many
