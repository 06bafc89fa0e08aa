"""Keys that are the values too, as latent attention has them: the same answers from half a record.

A session of one side and one that is given its keys as values, in records of two sides, must choose
and answer alike, to the bit, whatever is done to them.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvswap_torch import _C
from tests.python.session_pair import SessionPair
from tests.python.test_session import native, options

HEADS, LAYERS = 6, 2
METHODS = {
    "low rank": {},
    "mass": {"score": "mass"},
    "boxes": {"rows": "box", "ranks": []},
    "means": {"rows": "mean", "ranks": []},
    "an exact layer": {"exact_layers": [0]},
    "kept for what a prompt paid": {"keeper": "observed", "keep_tokens": 16, "keep_window": 8},
    "outliers kept": {"keeper": "outliers", "keep_tokens": 16},
    "kept and nothing else": {"rows": "none", "ranks": [], "keeper": "heavy", "keep_tokens": 16},
    "clusters": {"grouping": "clusters", "rows": "centroid", "ranks": [], "cluster_tokens": 8},
}


def opened(directory, sides: int, dim: int, dtype: torch.dtype, **changes) -> _C.TensorCache:
    sizes = {"layers": LAYERS, "query_heads": HEADS, "kv_heads": 1, "head_dim": dim}
    return native(options(directory, **sizes, sides=sides, dtype=dtype, **changes))


class Pair(SessionPair):
    """Of one side, and of two that are the same."""

    def __init__(self, directory, dim: int, dtype: torch.dtype, changes: dict):
        sessions = [opened(directory, sides, dim, dtype, **changes) for sides in (1, 2)]
        super().__init__(sessions, dtype, seed=dim)
        self.dim = dim
        self.project(LAYERS, dim, changes)

    def forward(self, batch: int, tokens: int, valid: torch.Tensor | None = None) -> None:
        self.all("begin_pass", "prefill" if tokens > 4 else "decode", valid)
        for layer in range(LAYERS):
            keys = self.random(batch, 1, tokens, self.dim)
            query = self.random(batch, HEADS, tokens, self.dim)
            if layer:
                self.all("look_ahead", layer, query)
            outputs = [each.extend(layer, query, keys, keys, 0.2) for each in self.sessions]
            assert torch.equal(*self.of_valid(valid, *outputs)), (layer, tokens)
            self.expect_same_choice(layer)


# A tiny latent in fp32 for every method, DeepSeek's in what models are in.
SIZES = [(method, torch.float32, 64) for method in METHODS]
SIZES += [("mass", dtype, 576) for dtype in (torch.bfloat16, torch.float16)]
SIZES += [("boxes", torch.float32, 576)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("method", "dtype", "dim"), SIZES, ids=str)
def test_as_with_keys_for_values(method, dtype, dim, tmp_path):
    rng = random.Random(dim)
    pair = Pair(tmp_path, dim, dtype, METHODS[method])
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[0, :19] = False
    pair.forward(2, 90, valid)
    for tokens in (1, 3, 1, 40, 1, 2, *(rng.choice([1, 1, 2, 9]) for _ in range(8))):
        pair.forward(2, tokens)
    if method != "clusters":
        pair.all("crop", 120)
        pair.all("fork")  # what is kept counts no more than is there
        pair.all("select_sequences", [1, 1, 0])
        for _ in range(6):
            pair.forward(3, 1)
    keys = [session.read_back(1, 3, 100) for session in pair.sessions]
    assert all(torch.equal(each, keys[1][0]) for each in (*keys[0], keys[1][1]))
    one, two = (session.counters()["bytes_written"] for session in pair.sessions)
    assert 0 < one <= 0.6 * two
    pair.fork()
    for tokens in (1, 2, 1):
        pair.forward(2 if method == "clusters" else 3, tokens)


def test_values_must_be_the_keys(tmp_path):
    session = opened(tmp_path, 1, 64, torch.float32)
    session.begin_pass("prefill")
    keys, query = torch.randn(1, 1, 20, 64), torch.randn(1, HEADS, 20, 64)
    with pytest.raises(ValueError, match="values must be the keys where the cache has one side"):
        session.extend(0, query, keys, keys.clone(), 0.2)
    with pytest.raises(ValueError, match="values must be the keys"):
        session.append(0, keys, keys.clone())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"records": "fp8"}, "the model's dtype, got storage.kv_dtype fp8"),
        ({"device": "host"}, "pages must be the host's"),
        ({"sides": 3}, "sides must be 1..2, got 3"),
    ],
)
def test_what_is_refused(changes, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        opened(tmp_path, changes.pop("sides", 1), 64, torch.float32, **changes)
