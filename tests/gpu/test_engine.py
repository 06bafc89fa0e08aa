"""`KVSwapCache` of a model on a CUDA device. Skipped where there is none, or no CUDA build."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.native import build_info
from tests.python.test_rounded_records import ROUNDED, RoundedCache
from tests.python.tiny_models import COVERING, SMALL, TIGHT, forward, greedy, prompt, tiny_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not (build_info() or {}).get("cuda"),
    reason="needs a CUDA device and libraries built for it",
)
FAMILIES = ["llama", "qwen2", "qwen3"]


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Callable[..., KVSwapCache]]:
    caches: list[KVSwapCache] = []

    def open_one(model: Any, config: Any = COVERING, **arguments: Any) -> KVSwapCache:
        caches.append(KVSwapCache(model, path=tmp_path, config=config, **arguments))
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close()


def expected(model: Any, inputs: dict, **arguments: Any) -> torch.Tensor:
    return greedy(model, inputs, DynamicCache(config=model.config), **arguments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [(), (0, 13, 40)])
def test_tokens_equal_a_cache_in_memory(open_cache, family, padding):
    model = tiny_model(family).cuda()
    inputs = on_gpu(prompt(3, 90, padding=padding))
    cache = open_cache(model)
    torch.testing.assert_close(greedy(model, inputs, cache, 40), expected(model, inputs, tokens=40))
    stats = cache.stats()
    assert stats.device == "cuda:0"
    assert stats.copied_bytes > 0
    assert 0 < stats.device_bytes <= stats.resident_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tight_budget_reads_and_chooses_as_the_cpu_does(open_cache, family):
    """Scores differ by rounding alone, so nearly all groups are the same."""
    model = tiny_model(family)
    inputs = prompt(2, 150)
    chosen = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        cache = open_cache(model, TIGHT)
        greedy(model, {name: each.to(device) for name, each in inputs.items()}, cache, 4)
        layers = range(cache.parts.shape.layers)
        session = cache.driver.session
        chosen.append({(i, b, g) for i in layers for b, groups in
                       enumerate(session.last_selection(i)) for g in groups})  # fmt: skip
        assert cache.stats().bytes_read > 0
    assert len(chosen[0] & chosen[1]) >= 0.8 * len(chosen[0])


@pytest.mark.parametrize("rows", ["box", "mean"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("summary_dtype", ["model", "int8"])
def test_rows_of_groups_are_made_and_scored_as_on_the_cpu(open_cache, rows, heads, summary_dtype):
    """With padding; by the kernels of summarize_groups(), ask_groups() and select_groups()."""
    small = {name: value for name, value in SMALL.items() if name not in ("rank", "group_tokens")}
    config = SwapConfig(
        rows=rows, heads=heads, summary_dtype=summary_dtype, group_tokens=8, groups_max=3,
        pages_max=6, **small,
    )  # fmt: skip
    model, inputs, chosen = tiny_model("llama"), prompt(2, 150, padding=(0, 21)), []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        cache = open_cache(model, config)
        greedy(model, {name: each.to(device) for name, each in inputs.items()}, cache, 4)
        session = cache.driver.session
        chosen.append({(i, b, g) for i in range(cache.parts.shape.layers) for b, groups in
                       enumerate(session.last_selection(i)) for g in groups})  # fmt: skip
    assert len(chosen[0] & chosen[1]) >= 0.8 * len(chosen[0])


def test_turns_crops_and_chunks_equal_a_cache_in_memory(open_cache):
    model = tiny_model("qwen3").cuda()
    cache, memory = open_cache(model), DynamicCache(config=model.config)
    ids = prompt(2, 200)["input_ids"].cuda()
    cuts = [0, 90, 91, 94, 160, 161, 200]
    with torch.no_grad():
        for begin, end in itertools.pairwise(cuts):
            new = ids[:, begin:end]
            ours = model(input_ids=new, **cache_argument(model, cache)).logits
            theirs = model(input_ids=new, **cache_argument(model, memory)).logits
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
        for each in (cache, memory):
            each.crop(-70)
        ours = model(input_ids=ids[:, 130:], **cache_argument(model, cache)).logits
        theirs = model(input_ids=ids[:, 130:], **cache_argument(model, memory)).logits
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_sdpa(open_cache, dtype):
    inputs = on_gpu(prompt(2, 160))["input_ids"]
    exact = tiny_model("llama").cuda()
    half = tiny_model("llama", dtype=dtype).cuda()

    def logits(model: Any, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            parts = [model(input_ids=inputs[:, :100], **cache_argument(model, cache)).logits]
            for i in range(100, 160):
                step = model(input_ids=inputs[:, i : i + 1], **cache_argument(model, cache))
                parts.append(step.logits)
        return torch.cat(parts, 1).float()

    truth = logits(exact, DynamicCache(config=exact.config))
    own = (logits(half, DynamicCache(config=half.config)) - truth).abs()
    ours = (logits(half, open_cache(half)) - truth).abs()
    assert ours.max() <= 2 * own.max()
    assert ours.mean() <= 2 * own.mean()


@pytest.mark.parametrize(("records", "difference"), [("fp8", 2e-2), ("int4", 2e-1)])
def test_rounded_records_are_a_cache_that_is_rounded(open_cache, records, difference):
    """Groups are encoded, attended, streamed past and cropped as e4m3, or as four bits."""
    rounded = dataclasses.replace(ROUNDED, records=records)
    model = tiny_model("llama", head_dim=64).cuda()
    caches = (
        open_cache(model, rounded),
        RoundedCache(model, rounded),
        DynamicCache(config=model.config),
    )
    ids = prompt(2, 160)["input_ids"].cuda()
    length = 0
    for i, tokens in enumerate((50, *(3,) * 6, 1, 1, 29, 1, 3)):
        chunk = ids[:, length : length + tokens]
        ours, theirs, plain = (forward(model, chunk, each) for each in caches)
        # A key that differs in its last bits may round to the next number of its form: on a CPU,
        # weights with a noise of 1e-4 bring 0.02 and 0.12, and a seventh of what rounding changes.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=difference)
        if i > 1:
            assert (ours - theirs).abs().mean() < 0.5 * (plain - theirs).abs().mean()
        length += tokens
        if i % 4 == 2:
            for each in caches:
                each.crop(-21)
            length -= 21
    inputs = {"input_ids": ids[:, :length], "attention_mask": torch.ones_like(ids[:, :length])}
    half = tiny_model("llama", head_dim=64, dtype=torch.bfloat16).cuda()
    assert greedy(half, inputs, open_cache(half, rounded), 20).shape == (2, length + 20)


RETAINING = [
    {"keeper": "observed", "keep_interval": 8},
    {"keeper": "observed", "keep_interval": 8, "keep_scores": "disk"},
    {"keeper": "heavy", "keep_interval": 8},
    {"keeper": "arkv", "keep_ratio": 0.5},
]


def retaining(records: str, keeper: dict[str, Any]) -> SwapConfig:
    """Small enough that tokens have to be retained."""
    return SwapConfig(
        rows="none", records=records, group_tokens=8, groups_max=2, pages_max=8, tail_tokens=16,
        sink_tokens=0, keep_tokens=32, keep_window=8, **keeper,
    )  # fmt: skip


@pytest.mark.parametrize("records", ["model", "fp8"])
@pytest.mark.parametrize(
    "keeper", RETAINING, ids=lambda keeper: "-".join(map(str, keeper.values()))
)
def test_kept_tokens_are_those_the_cpu_keeps(open_cache, keeper, records):
    """Of what is given alike: the tokens alone decide, and rounding seldom does."""
    config = retaining(records, keeper)
    inputs, facts = prompt(2, 150), []
    for device in ("cpu", "cuda"):
        model = tiny_model("llama", head_dim=64).to(device)
        cache = open_cache(model, config)
        ids = inputs["input_ids"].to(device)
        logits = [forward(model, ids[:, :100], cache)]
        logits += [forward(model, ids[:, i : i + 1], cache) for i in range(100, 150)]
        stats = cache.stats()
        facts.append((torch.cat(logits, 1).cpu(), stats.counters["turns"], stats.tokens_kept))
    (here, turns, kept), (there, turns_there, kept_there) = facts
    assert (turns, kept) == (turns_there, kept_there) and turns > 0 < kept
    apart = (here - there).abs().amax((0, 2))
    assert apart[:101].max() < 2e-3
    assert apart.median() < 2e-3, "where a token more or less is kept, few steps differ"


def test_two_caches_on_two_streams(open_cache):
    model = tiny_model("llama").cuda()
    texts = [on_gpu(prompt(2, 80, seed=seed)) for seed in (1, 2)]
    caches = [open_cache(model) for _ in texts]
    streams = [torch.cuda.Stream() for _ in texts]
    wanted = [expected(model, text, tokens=20) for text in texts]
    torch.cuda.synchronize()
    ids = [text["input_ids"] for text in texts]
    with torch.no_grad():
        for step in range(20):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    new = ids[i] if step == 0 else ids[i][:, -1:]
                    logits = model(input_ids=new, **cache_argument(model, caches[i])).logits
                    ids[i] = torch.cat([ids[i], logits[:, -1:].argmax(-1)], 1)
    torch.cuda.synchronize()
    for got, want in zip(ids, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_cache_may_change_its_stream(open_cache):
    model = tiny_model("qwen2").cuda()
    start = prompt(2, 80)["input_ids"].cuda()
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()
    texts = []
    for cache, other in ((DynamicCache(config=model.config), default), (open_cache(model), side)):
        other.wait_stream(default)
        ids = start
        with torch.no_grad():
            for step in range(20):
                stream, before = (other, default) if step % 2 else (default, other)
                stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    new = ids if step == 0 else ids[:, -1:]
                    logits = model(input_ids=new, **cache_argument(model, cache)).logits
                    ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        torch.cuda.synchronize()
        texts.append(ids)
    torch.testing.assert_close(texts[1], texts[0])


def test_a_closed_cache_gives_its_memory_back(open_cache):
    model = tiny_model("llama").cuda()
    inputs = on_gpu(prompt(2, 80))
    greedy(model, inputs, open_cache(model), 4)  # what CUDA and torch keep for good
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(5):
        cache = open_cache(model)
        greedy(model, inputs, cache, 4)
        cache.close()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free - (32 << 20)


def test_tensors_of_another_device_are_refused(open_cache):
    model = tiny_model("llama").cuda()
    cache = open_cache(model)
    keys = torch.zeros(1, cache.parts.shape.kv_heads, 4, cache.parts.shape.head_dim)
    with pytest.raises(ValueError, match="must be on the session's device"):
        cache.driver.session.append(0, keys, keys)
