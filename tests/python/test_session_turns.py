"""What turns of kept tokens take, and what is recalled beside them, in a session's counters."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.python.test_session import HEAD_DIM, HEADS, KV_HEADS, LAYERS, native, options


def feed(session, batch: int, tokens: int) -> None:
    """A pass of random tokens."""
    session.begin_pass("decode" if tokens <= 4 else "prefill")
    for layer in range(LAYERS):
        keys, values = torch.randn(2, batch, KV_HEADS, tokens, HEAD_DIM)
        session.extend(layer, torch.randn(batch, HEADS, tokens, HEAD_DIM), keys, values, 0.125)


@pytest.mark.parametrize(
    "changes",
    [
        {"keeper": "observed", "keep_interval": 4},
        {"keeper": "observed", "keep_interval": 4, "keep_scores": "disk"},
        {"keeper": "heavy", "keep_interval": 3},
        {"keeper": "arkv", "keep_ratio": 0.5},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
@pytest.mark.parametrize("rows", ["box", "none"])
def test_what_turns_cost_and_recalls_are_counted_and_never_fall(tmp_path, rows, changes):
    """Neither by a crop nor by beams, a reset, or a cache that everything fits again."""
    made = options(tmp_path, rows=rows, keep_tokens=16, keep_window=4, **changes)
    session = native(made)
    names = ("turns", "turn_seconds", "turn_bytes_read", "groups_recalled", "groups_attended")
    told = []

    def tell() -> None:
        counters = session.counters()
        told.append([counters[name] for name in names])
        assert counters["turn_bytes_read"] <= counters["bytes_read"]
        assert counters["groups_recalled"] <= counters["groups_attended"]

    tell()
    feed(session, 2, 20)
    feed(session, 2, 1)
    tell()
    turns, _, read, recalled, attended = told[-1]
    assert (turns, read, recalled) == (0, 0, 0) and attended > 0, "everything fits"
    for tokens in (150, *[1] * 10, 3, 1):
        feed(session, 2, tokens)
        tell()
    assert told[-1][2] > told[1][2], "after a prompt its records are read"
    assert (told[-1][3] > told[1][3]) == (rows == "box")
    session.crop(40)
    tell()
    session.select_sequences([1, 1, 0])
    for tokens in (60, 1, 1):
        feed(session, 3, tokens)
        tell()
    session.reset()
    tell()
    feed(session, 1, 20)
    feed(session, 1, 1)
    tell()
    for before, after in itertools.pairwise(told):
        assert all(a >= b for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("heads", ["all", "each"])
def test_a_turn_after_a_prompt_reads_its_layers_records_once(tmp_path, heads):
    """And so many selected groups are recalls as are not kept whole."""
    made = options(tmp_path, rows="box", heads=heads, keeper="observed", keep_tokens=8)
    made.keep_window, made.sink_tokens = 4, 0
    session = native(made)
    for tokens in (150, 1):
        feed(session, 2, tokens)
    counters = session.counters()
    parts = 2 * LAYERS * (KV_HEADS if heads == "each" else 1)
    read = counters["turn_bytes_read"] / counters["record_bytes"]
    # Once to weigh, and those groups again whose tokens are kept, with what lies between.
    assert counters["records_sealed"] < read < 2 * counters["records_sealed"]
    assert counters["groups_recalled"] == counters["groups_attended"] == parts * made.groups_max
