"""Values narrower than keys, as MiMo V2 has them: the same answers from records without zeros.

A session of narrow values and one that is given them with zeros behind, as wide as keys, must
choose and answer alike, to the bit, whatever is done to them.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from kvswap_torch import _C
from tests.python.session_pair import SessionPair
from tests.python.test_session import native, options

LAYERS, HEADS, KV_HEADS = 2, 6, 2
WIDE, NARROW = 192, 128  # of MiMo V2 Flash
CLUSTERS = {
    "grouping": "clusters",
    "rows": "centroid",
    "ranks": [],
    "cluster_tokens": 8,
    "look_ahead": "off",  # or what is there would depend on times
}
METHODS = {
    "low rank": {},
    "mass": {"score": "mass"},
    "look-ahead": {"look_ahead": "verify"},
    "each head": {"heads": "each", "group_tokens": 8},
    "boxes": {"rows": "box", "ranks": []},
    "means": {"rows": "mean", "ranks": []},
    "an exact layer": {"exact_layers": [0]},
    "e4m3": {"records": "fp8", "group_tokens": 8},
    "four bits": {"records": "int4", "group_tokens": 8},
    "kept for attention": {"keeper": "observed", "keep_tokens": 16, "keep_window": 8},
    "kept in two precisions": {"rows": "none", "ranks": [], "keeper": "arkv", "keep_tokens": 24},
    "outliers kept": {"keeper": "outliers", "keep_tokens": 16},
    "kept and nothing else": {"rows": "none", "ranks": [], "keeper": "heavy", "keep_tokens": 16},
    "clusters": CLUSTERS,
    "clusters in pools": CLUSTERS | {"layout": "pools"},
    "clusters in e4m3": CLUSTERS | {"records": "fp8", "group_tokens": 8, "cluster_tokens": 16},
}


def opened(directory, value_dim: int, dtype: torch.dtype, **changes) -> _C.TensorCache:
    sizes = {"layers": LAYERS, "query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDE}
    return native(options(directory, **sizes, value_dim=value_dim, dtype=dtype, **changes))


class Pair(SessionPair):
    """Of narrow values, and of those with zeros behind."""

    def __init__(self, directory, dtype: torch.dtype, changes: dict):
        super().__init__(
            [opened(directory, dim, dtype, **changes) for dim in (NARROW, 0)], dtype, 7
        )
        self.project(LAYERS, KV_HEADS * WIDE, changes)

    def forward(self, batch: int, tokens: int, valid: torch.Tensor | None = None) -> None:
        self.all("begin_pass", "prefill" if tokens > 4 else "decode", valid)
        for layer in range(LAYERS):
            keys = self.random(batch, KV_HEADS, tokens, WIDE)
            values = self.random(batch, KV_HEADS, tokens, NARROW)
            query = self.random(batch, HEADS, tokens, WIDE)
            if layer:
                self.all("look_ahead", layer, query)
            narrow, wide = self.sessions
            one = narrow.extend(layer, query, keys, values, 0.2)
            two = wide.extend(layer, query, keys, F.pad(values, (0, WIDE - NARROW)), 0.2)
            one, two = self.of_valid(valid, one, two)
            assert one.shape == (batch, tokens, HEADS, NARROW)
            assert torch.equal(one, two[..., :NARROW]), (layer, tokens)
            assert not two[..., NARROW:].any()
            self.expect_same_choice(layer)

    def compare_contents(self, begin: int, end: int) -> None:
        for layer in range(LAYERS):
            (keys, values), wide = (each.read_back(layer, begin, end) for each in self.sessions)
            assert torch.equal(keys, wide[0]) and torch.equal(values, wide[1][..., :NARROW])
            assert values.shape[3] == NARROW


# All methods in fp32; in what models are in, the kernels that take pairs of bf16 among them.
SIZES = [(method, torch.float32) for method in METHODS]
SIZES += [(m, d) for m in ("mass", "e4m3", "clusters") for d in (torch.bfloat16, torch.float16)]
SIZES += [("four bits", torch.bfloat16)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("method", "dtype"), SIZES, ids=str)
def test_as_with_zeros_behind(method, dtype, tmp_path):
    rng = random.Random(5)
    pair = Pair(tmp_path, dtype, METHODS[method])
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[0, :19] = False
    pair.forward(2, 90, valid)
    for tokens in (1, 3, 1, 40, 1, 2, *(rng.choice([1, 1, 2, 9]) for _ in range(8))):
        pair.forward(2, tokens)
    pair.fork()
    pair.forward(2, 1)
    if "clusters" not in method:
        pair.all("crop", 120)
        pair.all("select_sequences", [1, 1, 0])
        for _ in range(6):
            pair.forward(3, 1)
    if not method.startswith("kept"):
        pair.compare_contents(3, 100)


@pytest.mark.usefixtures("one_thread")
def test_records_pages_and_what_streams_are_smaller(tmp_path):
    """8 tokens of 2 KV heads in bf16: 10,240 bytes, where 12,288 were with zeros behind."""
    sizes = {"group_tokens": 8, "ranks": [16], "io_mode": "buffered"}
    pair = Pair(tmp_path, torch.bfloat16, sizes)
    pair.forward(2, 96)
    one, two = (session.counters() for session in pair.sessions)
    assert 0 < 6 * one["bytes_written"] == 5 * two["bytes_written"]
    assert 6 * one["record_bytes"] == 5 * two["record_bytes"]
    one, two = (session.ledger() for session in pair.sessions)
    assert 0 < 6 * one["pages"] == 5 * two["pages"]
    assert one["summary"] == two["summary"]


def test_values_must_be_as_wide_as_the_cache_says(tmp_path):
    session = opened(tmp_path, NARROW, torch.float32)
    session.begin_pass("prefill")
    keys, query = torch.randn(1, KV_HEADS, 20, WIDE), torch.randn(1, HEADS, 20, WIDE)
    for call in (
        lambda: session.extend(0, query, keys, keys, 0.2),
        lambda: session.append(0, keys, keys),
    ):
        with pytest.raises(ValueError, match=r"values must be \[batch, 2, tokens, 128\]"):
            call()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "host"}, "value_dim must be head_dim on a device, .* pad the values"),
        ({"sides": 1, "kv_heads": 1}, "value_dim must be 0 where keys are the values too"),
        ({"value_dim": 193}, "value_dim must be 0..192, got 193"),
        ({"value_dim": 40, "records": "int4"}, "multiple of 16, and value_dim too, got 40"),
    ],
)
def test_what_is_refused(changes, why, tmp_path):
    made = {"layers": 1, "query_heads": 4, "kv_heads": 2, "head_dim": WIDE, "value_dim": NARROW}
    with pytest.raises(ValueError, match=why):
        native(options(tmp_path, **(made | changes)))
