"""Tiny models that decode from disk, in every combination that has a path of its own.

What a model computes depends on the CPU, so two records are compared on one machine only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvswap_torch import KVSwapCache
from kvswap_torch.hf import session as session_module
from tests.golden.record import counted, quiet
from tests.python.tiny_models import TIGHT, forward, greedy, host_device_options, prompt, tiny_model

MODELS = ("llama", "qwen3")
PROMPT_TOKENS = 70
DECODED_TOKENS = 14
PRKV = {"rows": "box", "rank": 32, "keeper": "observed", "keep_tokens": 12, "keep_window": 8,
        "keep_pool": 1, "keep_interval": 5}  # fmt: skip
ARKV = {"rows": "none", "rank": 32, "keeper": "arkv", "keep_tokens": 20, "keep_window": 8,
        "keep_variance": 263.8108280337562, "keep_ratio": None}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run; `settings` go on top of those of the tests, None: there is no config."""

    model: str
    dtype: torch.dtype = torch.float32
    batch: int = 4
    device: str = "cpu"
    is_edited: bool = False
    settings: dict[str, Any] | None = field(default_factory=dict)
    promises: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.model, str(self.dtype).removeprefix("torch."), f"batch {self.batch}"]
        words += [self.device] if self.device != "cpu" else []
        words += ["edited"] if self.is_edited else []
        words += ["no config"] if self.settings is None else []
        told = (self.settings or {}) | self.promises
        return ", ".join([*words, *(f"{name} {value}" for name, value in told.items())])


def cases() -> list[Case]:
    """All runs: the grid of dtype, batch and look-ahead, then what has a path of its own."""
    made = []
    for model in MODELS:
        for dtype, batch, look_ahead in itertools.product(
            (torch.float32, torch.bfloat16), (1, 4), (True, False)
        ):
            made.append(Case(model, dtype, batch, settings={"look_ahead": look_ahead}))
        made += [
            Case(model, settings={"summary_dtype": "int8"}),
            Case(model, torch.bfloat16, settings={"summary_dtype": "int8"}, device="host"),
            Case(model, device="host"),
            Case(model, torch.bfloat16, batch=1, device="host", settings={"look_ahead": False}),
            Case(model, is_edited=True),
            Case(model, is_edited=True, device="host"),
            Case(model, settings={"replacement": "lru", "true_query_layers": (1,)}),
            Case(model, settings={"groups_max": 60, "pages_max": 60}),
            Case(model, settings=PRKV),
            Case(model, settings=PRKV | {"keep_scores": "disk"}, is_edited=True),
            Case(model, settings=ARKV),
            Case(model, torch.bfloat16, settings=ARKV, is_edited=True),
            Case(model, settings=None, promises={"kv_memory_bytes": 2 << 20, "max_context": 300,
                                                 "max_batch": 4}),
            Case(model, settings={}, promises={"kv_memory_bytes": 3 << 20}),
        ]  # fmt: skip
    return made


def run_all() -> dict[str, Any]:
    """What each run came to, by its name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of a split matrix differ with the number of its parts
    try:
        return {case.name: run(case) for case in cases()}
    finally:
        torch.set_num_threads(threads)


def run(case: Case) -> dict[str, Any]:
    """Tokens, choices of every pass and layer, counters and ledger."""
    model = tiny_model(case.model, dtype=case.dtype)
    config = None
    if case.settings is not None:
        config = dataclasses.replace(TIGHT, reader="threads", **case.settings)
    with (
        tempfile.TemporaryDirectory() as folder,
        _on(case.device),
        KVSwapCache(model, path=folder, config=config, **case.promises) as cache,
    ):
        told = _edited(model, cache) if case.is_edited else _decoded(model, cache, case.batch)
        return told | counted(cache.driver.session)


def _decoded(model: Any, cache: KVSwapCache, batch: int) -> dict[str, Any]:
    inputs = prompt(batch, PROMPT_TOKENS, padding=(0, 5, 33, 1)[:batch])
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    tokens, choices = [], []
    for _ in range(DECODED_TOKENS):
        logits = forward(model, ids, cache, attention_mask=mask)
        ids = logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        tokens.append(ids.flatten().tolist())
        choices.append(_choices(cache))
    return {"tokens": tokens, "choices": choices}


def _edited(model: Any, cache: KVSwapCache) -> dict[str, Any]:
    """Three turns over one text, its end taken back in between; beams; then another text."""
    inputs = prompt(2, PROMPT_TOKENS, padding=(0, 6))
    tokens = [greedy(model, inputs, cache).tolist()]
    choices = [_choices(cache)]
    quiet(cache.driver.session)
    cache.crop(PROMPT_TOKENS - 20 - cache.get_seq_length())
    tokens.append(greedy(model, inputs, cache).tolist())
    choices.append(_choices(cache))
    quiet(cache.driver.session)
    cache.reset()
    other = prompt(1, 50, seed=5)
    tokens.append(greedy(model, other, cache, num_beams=3).tolist())
    choices.append(_choices(cache))
    quiet(cache.driver.session)
    cache.reset()
    tokens.append(greedy(model, prompt(2, 40, seed=6), cache).tolist())
    choices.append(_choices(cache))
    return {"tokens": tokens, "choices": choices}


def _choices(cache: KVSwapCache) -> list[Any]:
    """[layers][batch][groups], as the newest pass chose them."""
    session = cache.driver.session
    return [session.last_selection(layer) for layer in range(len(cache.parts.disk))]


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """Opens sessions on the device path over CPU tensors where `device` is "host"."""
    before = session_module.cache_options
    if device == "host":
        session_module.cache_options = host_device_options
    try:
        yield
    finally:
        session_module.cache_options = before
