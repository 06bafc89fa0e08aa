"""Records of fp8 and int4: as a cache whose positions the codec rounds when they are sealed."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import ConfigError, KVSwapCache
from kvswap_torch.hf import session as session_module
from kvswap_torch.hf.key_probe import probe
from tests.how_long import lives
from tests.python.test_hf_selection import conversation
from tests.python.test_session import BACK_ENDS, HEAD_DIM, Twins, live, options
from tests.python.tiny_models import (
    COVERING,
    forward,
    greedy,
    has_native,
    host_device_options,
    prompt,
    tiny_model,
)
from tests.reference import rounded_records

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
# A record of the tiny models below fills half a block of 4 KiB.
ROUNDED = dataclasses.replace(
    COVERING, records="fp8", group_tokens=8, tail_tokens=5, sink_tokens=0, groups_max=100
)
TIGHT = dataclasses.replace(ROUNDED, groups_max=2, pages_max=5, sink_tokens=3, rank=8)


class RoundedCache(DynamicCache):
    """Everything in memory; groups that have left the tail are rounded, once attended over."""

    def __init__(self, model, settings=ROUNDED) -> None:
        super().__init__(config=model.config)
        self._group, self._tail = settings.group_tokens, settings.tail_tokens
        self._records = settings.records
        for layer in self.layers:
            layer.update = self._after_rounding(layer, layer.update)
            layer.rounded = 0  # tokens

    def _round(self, layer) -> None:
        if not layer.is_initialized:
            return
        group = self._group
        first = layer.rounded
        end = max(first, (layer.keys.shape[2] - self._tail) // group * group)
        if end == first:
            return
        sealed = [
            side[:, :, first:end].unflatten(2, (-1, group)) for side in (layer.keys, layer.values)
        ]
        keys, values = rounded_records(self._records, *sealed)
        for name, rounded in (("keys", keys), ("values", values)):
            side = getattr(layer, name).clone()
            side[:, :, first:end] = rounded.flatten(2, 3)
            setattr(layer, name, side)
        layer.rounded = end

    def _after_rounding(self, layer, update):
        def updated(*arguments, **named):
            self._round(layer)
            return update(*arguments, **named)

        return updated

    def crop(self, *arguments) -> None:
        for layer in self.layers:  # what was sealed comes back rounded
            self._round(layer)
        super().crop(*arguments)
        for layer in self.layers:
            left = max(0, layer.keys.shape[2] - self._tail) // self._group * self._group
            layer.rounded = min(layer.rounded, left)


@pytest.fixture(scope="module")
def wide():
    return tiny_model("llama", head_dim=64)


@pytest.fixture(params=["fp8", "int4"])
def records(request):
    return request.param


@pytest.fixture(params=["native", "host device"])
def open_rounded(wide, tmp_path, request, monkeypatch, records):
    if request.param == "host device":
        monkeypatch.setattr(session_module, "cache_options", host_device_options)
    with KVSwapCache(wide, tmp_path, dataclasses.replace(ROUNDED, records=records)) as cache:
        yield cache


def both(wide, open_rounded, records):
    return open_rounded, RoundedCache(wide, dataclasses.replace(ROUNDED, records=records))


def test_tokens_of_a_batch_with_padding(wide, open_rounded, records):
    inputs = prompt(3, 61, padding=(0, 19, 3))
    caches = both(wide, open_rounded, records)
    ours, theirs = (greedy(wide, inputs, cache, tokens=30) for cache in caches)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, greedy(wide, inputs, tokens=30)), "rounding must be seen"


def test_beams(wide, open_rounded, records):
    inputs = prompt(2, 43, padding=(3, 0))
    arguments = {"num_beams": 3, "num_return_sequences": 2, "tokens": 20}
    ours, theirs = (greedy(wide, inputs, c, **arguments) for c in both(wide, open_rounded, records))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.pairs
def test_chunks_and_crops(wide, open_rounded, chunk, records):
    """Long and short chunks, steps, crops into sealed groups: the same logits all along."""
    ids = prompt(2, 160, seed=chunk)["input_ids"]
    caches = (*both(wide, open_rounded, records), DynamicCache(config=wide.config))
    length = 0
    for i, tokens in enumerate((50, *(chunk,) * 6, 1, 1, 29, 1, chunk)):
        chunk_ids = ids[:, length : length + tokens]
        ours, theirs, plain = (forward(wide, chunk_ids, cache) for cache in caches)
        # A key that differs in its last bit may round to the next number of e4m3.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-3)
        if i > 1:
            assert (ours - plain).abs().max() > 0.02, "rounding must be seen"
        length += tokens
        if i % 4 == 2:
            for cache in caches:
                cache.crop(-21)
            length -= 21


def test_save_open_and_fork_go_on_rounded(wide, open_rounded, tmp_path, records):
    inputs = prompt(1, 60)
    ours, theirs = both(wide, open_rounded, records)
    out = greedy(wide, inputs, ours, tokens=9)
    assert torch.equal(greedy(wide, inputs, theirs, tokens=9), out)
    ours.save(tmp_path / "saved.kvswap")
    more = {"input_ids": out, "attention_mask": torch.ones_like(out)}
    fork = ours.fork()
    expected = greedy(wide, more, theirs, tokens=25)
    with KVSwapCache.open(wide, tmp_path / "saved.kvswap", path=tmp_path) as opened:
        opened.save(tmp_path / "copied.kvswap")  # what was opened is copied, not linked
        assert torch.equal(greedy(wide, more, opened, tokens=25), expected)
    with KVSwapCache.open(wide, tmp_path / "copied.kvswap", path=tmp_path) as opened:
        assert torch.equal(greedy(wide, more, opened, tokens=25), expected)
    assert torch.equal(greedy(wide, more, fork, tokens=25), expected)
    assert torch.equal(greedy(wide, more, ours, tokens=25), expected)
    fork.close()


@pytest.mark.parametrize("look_ahead", [True, False], ids=["ahead", "true-query"])
@pytest.mark.parametrize("rows", ["low_rank", "box"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("kind", ["native", "host device"])
@pytest.mark.pairs
def test_choices_are_the_references(
    wide, kind, rows, heads, look_ahead, records, tmp_path, monkeypatch
):
    changes = {"records": records, "rows": rows, "heads": heads, "look_ahead": look_ahead}
    if rows == "box":
        changes["rank"] = 32
    if heads == "each":
        changes["group_tokens"] = 16
    config = dataclasses.replace(TIGHT, **changes)
    if kind == "host device":
        monkeypatch.setattr(session_module, "cache_options", host_device_options)
    logits, chosen, _ = conversation(wide, tmp_path, config, kind, monkeypatch)
    expected, _, _ = conversation(wide, tmp_path, config, "reference", monkeypatch, chosen)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(2, 6)))
def test_random_operations(tmp_path, seed, heads, records):
    rng = random.Random(seed)
    made = options(
        tmp_path,
        records=records,
        heads=heads,
        rows=rng.choice(["low_rank", "box", "mean", "none"]),
        exact_layers=rng.choice([[], [1]]),
        group_tokens=rng.choice([16, 19]) if heads == "each" else rng.choice([8, 11, 16]),
        groups_max=rng.choice([1, 3, 8]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 20]),
        select_queries_max=rng.choice([1, 4]),
        **rng.choice(BACK_ENDS),
    )
    live(made, rng, seed)


def test_the_bytes_that_are_saved_and_the_ledger_holds(wide, tmp_path):
    inputs = prompt(2, 300)
    facts = []
    for records in ("model", "fp8", "int4"):
        config = dataclasses.replace(TIGHT, records=records, rank=16)
        with KVSwapCache(wide, tmp_path, config) as cache:
            greedy(wide, inputs, cache, tokens=20)
            facts.append(cache.stats())
    plain, rounded, coded = facts
    # float32: a quarter.
    assert rounded.bytes_written * 4 == plain.bytes_written
    assert 0 < rounded.bytes_read < plain.bytes_read  # what merging reads beside depends
    assert rounded.bytes_read_per_token < 0.3 * plain.bytes_read_per_token
    assert rounded.ledger["pages"] < 0.7 * plain.ledger["pages"]
    # Of 8 tokens of 64: 1,122 bytes for 2,048, padded to 1,536; in memory as they were.
    assert coded.bytes_written < 0.8 * rounded.bytes_written
    assert coded.bytes_read_per_token < 0.8 * rounded.bytes_read_per_token
    assert coded.ledger["pages"] == plain.ledger["pages"]


def test_what_is_no_number_stays_visible(tmp_path, records):
    twins = Twins(options(tmp_path, records=records, group_tokens=8, groups_max=100, pages_max=100))
    session = twins.sessions[0]
    keys = torch.randn(1, 2, 60, HEAD_DIM)
    values = torch.randn(1, 2, 60, HEAD_DIM)
    values[0, 1, 20, 5], values[0, 1, 21, 6] = torch.nan, torch.inf
    session.append(0, keys, values)
    back = session.read_back(0, 0, 60)[1]
    assert back[0, 1, 20, 5].isnan() and back[0, 1, 21, 6].isnan()
    assert back.isnan().sum() == (2 if records == "fp8" else 2 * HEAD_DIM)  # or their blocks


def test_refusals_name_the_number(tmp_path, records):
    small = dataclasses.replace(ROUNDED, records=records, group_tokens=1)
    with pytest.raises(ConfigError, match="records: must be"):
        dataclasses.replace(ROUNDED, records="e5m2")
    narrow = tiny_model("llama", head_dim=16, num_key_value_heads=1)
    word = {"fp8": "fp8_e4m3", "int4": "int4"}[records]
    with (
        pytest.raises(
            ValueError,
            match=f"storage.kv_dtype {word} selection.group_tokens must be at least [0-9]+, so",
        ),
        KVSwapCache(narrow, tmp_path, small) as cache,
    ):
        greedy(narrow, prompt(1, 20), cache)


def test_four_bits_want_heads_of_whole_blocks(tmp_path):
    model = tiny_model("llama", head_dim=24)
    config = dataclasses.replace(ROUNDED, records="int4")
    with (
        pytest.raises(ValueError, match="int4 head_dim must be a multiple of 16, got 24"),
        KVSwapCache(model, tmp_path, config) as cache,
    ):
        greedy(model, prompt(1, 20), cache)


def test_the_probe_knows_rounding_from_another_model(wide, tmp_path, records):
    """Of whole groups, a part of one, sinks and tail; a key projection that is a third off."""
    settings = dataclasses.replace(ROUNDED, records=records, sink_tokens=3)
    ids = prompt(1, 60)["input_ids"]
    model = copy.deepcopy(wide)
    with KVSwapCache(model, tmp_path, settings) as cache:
        forward(model, ids, cache)
        assert probe(cache, ids, None).startswith("passed: keys and values of 16 tokens")
        torch.manual_seed(0)
        for layer in model.model.layers:
            weight = layer.self_attn.k_proj.weight
            weight.data += 0.33 * weight.std() * torch.randn_like(weight)
        with pytest.raises(ConfigError, match="the keys of its first tokens differ by"):
            probe(cache, ids, None)
