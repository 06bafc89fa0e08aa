"""replacement=score: who was paid least when it was last attended leaves first."""

from __future__ import annotations

import pytest
import torch

from tests.python.test_session import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    Twins,
    native,
    options,
    projection,
)


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("records", ["model", "fp8", "int4"])
def test_what_is_loaded_is_what_such_a_buffer_lacks(tmp_path, heads, records):
    """Choices drift, from step to step: a buffer of 7 pages beside one of a few lines."""
    made = options(tmp_path, rows="box", heads=heads, records=records, replacement="score")
    made.group_tokens, made.groups_max, made.pages_max = 16, 4, 7
    made.select_queries_max = 2
    twins = Twins(made)
    specified = twins.sessions[1]
    of_heads = getattr(specified, "_of_heads", [specified])
    paid: dict[tuple[int, int, int], torch.Tensor] = {}  # [positions]
    for head, session in enumerate(of_heads):
        watch(session, head, paid)
    buffers: dict[tuple[int, int, int], dict[int, float]] = {}
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, HEADS, 1, HEAD_DIM, generator=generator)
    twins.forward(2, 400)
    expected = loaded = 0
    differs = False
    for _ in range(30):
        query = 0.9 * query + 0.4 * torch.randn(query.shape, generator=generator)
        keys, values = twins.random(2, 2, KV_HEADS, 1, HEAD_DIM)
        twins.all("begin_pass", "decode")
        for layer in range(LAYERS):
            for session in twins.sessions:
                session.append(layer, keys, values)
                session.attend(layer, query, 0.125)
            for place, buffer in ((p, buffers.setdefault(p, {})) for p in paid if p[0] == layer):
                chosen = of_heads[place[2]]._layers[layer].selection[place[1]]
                missing = [group for group in chosen if group not in buffer]
                expected += len(missing)
                others = sorted((g for g in buffer if g not in chosen), key=buffer.__getitem__)
                for group in others[: max(0, len(buffer) + len(missing) - 7)]:
                    differs |= group != next(g for g in buffer if g not in chosen)
                    del buffer[group]
                for group in chosen:
                    buffer[group] = paid[place][16 * group : 16 * (group + 1)].sum().item()
        loaded = twins.sessions[0].counters()["groups_loaded"]
        assert loaded == expected
    assert 0 < loaded < twins.sessions[0].counters()["groups_attended"]
    assert differs, "fifo would do the same"


def watch(session, head: int, paid) -> None:
    """Keeps what each position was paid, by (layer, sequence, head)."""
    attention = session._attention

    def seen(state, query, visible, terms):
        output, (weights, sums) = attention(state, query, visible, terms)
        for layer, each in session._layers.items():
            for sequence in range(len(weights) if each is state else 0):  # a step's, no chunk's
                paid[layer, sequence, head] = weights[sequence].mean(1).sum(0)
        return output, (weights, sums)

    session._attention = seen


def test_keys_that_are_no_numbers_are_rated_too(tmp_path):
    made = options(tmp_path, rows="mean", replacement="score", groups_max=2, pages_max=4)
    session = native(made)
    for tokens in (100, 1, 1, 1):
        session.begin_pass("decode" if tokens == 1 else "prefill")
        keys = torch.randn(1, KV_HEADS, tokens, HEAD_DIM)
        keys[:, :, : tokens // 2] = torch.nan if tokens > 1 else 1.0
        query = torch.randn(1, HEADS, tokens, HEAD_DIM)
        for layer in range(LAYERS):
            session.append(layer, keys, keys)
            session.attend(layer, query, 0.125)
    assert session.counters()["groups_attended"] > 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "changes",
    [
        {"rows": "mean"},
        {"rows": "mean", "summary_dtype": "int8", "score": "max"},
        {"rows": "low_rank"},
        {"rows": "low_rank", "summary_dtype": "int8", "score": "mass"},
        {"rows": "low_rank", "summary_dtype": "int4", "score": "max_mass"},
        {"rows": "low_rank", "summary_dtype": "model", "score": "mass"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
@pytest.mark.parametrize("device", ["cpu", "host"])
def test_a_group_with_a_key_that_is_no_number_is_chosen_first(tmp_path, device, changes, bad):
    made = options(tmp_path, groups_max=2, device=device, **changes)
    session = native(made)
    for layer in range(LAYERS if made.rows == "low_rank" else 0):
        session.set_projection(layer, *projection(layer))
    generator = torch.Generator().manual_seed(0)
    for tokens in (150, 1, 1):
        session.begin_pass("decode" if tokens == 1 else "prefill")
        keys, values = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, generator=generator)
        if tokens > 1:
            keys[0, 0, 60, 3] = bad
        query = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator)
        for layer in range(LAYERS):
            session.extend(layer, query, keys, values, 0.125)
            if tokens == 1:
                assert 60 // made.group_tokens in session.last_selection(layer)[0]


@pytest.mark.parametrize("records", ["model", "fp8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("keeper", ["none", "observed", "heavy", "arkv"])
def test_a_key_that_is_no_number_is_attended_and_seen(tmp_path, keeper, bad, records):
    """Of boxes its group's is the largest."""
    kept = {} if keeper == "none" else {"keeper": keeper, "keep_tokens": 16}
    made = options(tmp_path, rows="box", records=records, group_tokens=16, groups_max=2, **kept)
    made.keep_interval = 2 if keeper == "heavy" else 0
    session = native(made)
    generator = torch.Generator().manual_seed(0)
    for tokens in (150, 1, 1, 1):
        keys, values = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, generator=generator)
        if tokens > 1:
            keys[0, 0, 60, 3] = bad
        query = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator).abs()
        for layer in range(LAYERS):
            output = session.extend(layer, query, keys, values, 0.125)
            of_head = output[:, -1:, : HEADS // KV_HEADS]
            # One that is infinitely small is attended with a weight of 0, unless it was rounded.
            is_seen = bad != -torch.inf or (records != "model" and tokens == 1)
            assert of_head.isnan().any() == is_seen
            assert output[:, -1:, HEADS // KV_HEADS :].isfinite().all()
    assert session.read_back(0, 60, 61)[0][0, 0, 0, 3].isfinite().logical_not()
