"""Layers fed with small whole numbers: products and sums are exact in any order.

So the scores, and with them the choices, bytes and counters, are the same on every CPU. What tokens
were paid is not exact, but no two of so few are paid within 1e-5 of the same: who is kept, which
shows in what is read, does not depend on it either.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from kvswap_torch import _C
from kvswap_torch.chunks import pass_of
from tests.golden.record import counted, quiet

LAYERS, HEADS, KV_HEADS, HEAD_DIM, RANK = 2, 4, 2, 32, 8
OPTIONS: dict[str, Any] = {
    "layers": LAYERS,
    "query_heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "ranks": [RANK],
    "group_tokens": 4,
    "groups_max": 5,
    "pages_max": 12,
    "tail_tokens": 8,
    "sink_tokens": 4,
    "select_queries_max": 4,
    # What a record is padded to must not depend on the disk.
    "io_mode": "buffered",
    "reader": "threads",
}
BOX: dict[str, Any] = {"rows": "box", "ranks": [], "keep_pool": 1}
DROPS: dict[str, Any] = {"rows": "none", "ranks": [], "groups_max": 1}
CASES: dict[str, dict[str, Any]] = {
    "exact, float32": {},
    "exact, float32, batch 1": {"batch": 1},
    "exact, bfloat16": {"dtype": torch.bfloat16},
    "exact, no look-ahead": {"look_ahead": False},
    "exact, lru": {"replacement": "lru", "group_tokens": 2},
    "exact, nothing kept": {"replacement": "none"},
    "exact, merged": {"merge_gap_bytes": 4096, "merge_bytes_max": 16384, "groups_max": 9},
    "exact, host": {"device": "host"},
    "exact, host, bfloat16": {"device": "host", "dtype": torch.bfloat16},
    "exact, prkv": BOX
    | {"heads": "each", "keeper": "observed", "keep_tokens": 8, "keep_window": 6}
    | {"keep_interval": 3},
    "exact, snapkv+": DROPS
    | {"keeper": "observed", "keep_tokens": 13, "keep_window": 6, "keep_interval": 3}
    | {"keep_scores": "disk"},
    "exact, arkv": DROPS
    | {"keeper": "arkv", "keep_tokens": 12, "keep_window": 6, "keep_variance": 263.8}
    | {"keep_ratio": None, "keep_temperatures": (1.0, 0.5, 0.5)},
    "exact, arkv, tokens counted": BOX
    | {"keeper": "arkv", "keep_tokens": 12, "keep_window": 6, "keep_ratio": 0.5}
    | {"keep_count": "tokens", "group_tokens": 2},
    "exact, h2o": DROPS | {"keeper": "heavy", "keep_tokens": 9, "keep_interval": 1},
    "exact, budget": {"kv_memory_bytes": 2 << 20, "max_context": 400, "max_batch": 4},
}


def run_all() -> dict[str, Any]:
    """What each run came to, by its name."""
    return {name: run(dict(changes)) for name, changes in CASES.items()}


def run(changes: dict[str, Any]) -> dict[str, Any]:
    """Choices of every pass and layer, counters and ledger."""
    batch, look_ahead = changes.pop("batch", 2), changes.pop("look_ahead", True)
    with tempfile.TemporaryDirectory() as folder:
        options = _C.CacheOptions()
        asked = {"directory": folder, "look_ahead": "trust" if look_ahead else "off"}
        for name, value in (OPTIONS | changes | asked).items():
            setattr(options, name, value)
        session = _C.TensorCache(options)
        dtype, has_rank = changes.get("dtype", torch.float32), "rows" not in changes
        passes = _Passes(session, dtype, look_ahead, has_rank)
        told: dict[str, Any] = {"choices": passes.run(batch)}
        told |= ({"kept": passes.kept} if "keeper" in changes else {}) | counted(session)
        session.close()
    return told


class _Passes:
    """A prompt with padding, decoding, a crop, other sequences, a long chunk, a reset."""

    def __init__(self, session: Any, dtype: torch.dtype, look_ahead: bool, has_rank: bool):
        self._session, self._dtype, self._look_ahead = session, dtype, look_ahead
        self._generator = torch.Generator().manual_seed(5)
        self._choices: list[Any] = []
        self.kept: list[Any] = []  # after each pass: tokens kept, of them in e4m3, bytes read
        for layer in range(LAYERS if has_rank else 0):
            pair = (self._whole(KV_HEADS * HEAD_DIM, RANK).float() for _ in range(2))
            session.set_projection(layer, *pair)

    def run(self, batch: int) -> list[Any]:
        valid = torch.ones(batch, 90, dtype=torch.bool)
        valid[0, :7] = False
        self._forward(batch, 90, valid)
        for _ in range(8):
            self._forward(batch, 1)
        self._forward(batch, 3)
        quiet(self._session)
        self._session.crop(81)
        self._forward(batch, 2)
        self._session.select_sequences([batch - 1, 0, 0])
        for _ in range(4):
            self._forward(3, 1)
        self._forward(3, 40)
        self._forward(3, 1)
        quiet(self._session)
        self._session.reset()
        self._forward(1, 60)
        self._forward(1, 1)
        return self._choices

    def _whole(self, *shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=self._generator).to(self._dtype)

    def _forward(self, batch: int, tokens: int, valid: torch.Tensor | None = None) -> None:
        self._session.begin_pass(pass_of(tokens, OPTIONS["select_queries_max"]), valid)
        for layer in range(LAYERS):
            keys, values = (self._whole(batch, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
            query = self._whole(batch, HEADS, tokens, HEAD_DIM)
            if layer and self._look_ahead:
                self._session.look_ahead(layer, query)
            self._session.extend(layer, query, keys, values, 0.125)
            self._choices.append(self._session.last_selection(layer))
        counters = self._session.counters()
        names = ("tokens_kept", "tokens_kept_fp8", "bytes_read")
        self.kept.append([counters.get(name) for name in names])
