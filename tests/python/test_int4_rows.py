"""summary_dtype=int4: half of int8's bytes, on a device too, and of low-rank rows alone."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import _C
from kvswap_torch.chunks import pass_of
from tests.python.test_session import HEAD_DIM, HEADS, KV_HEADS, LAYERS, native, options, projection


def opened(directory, **changes) -> _C.TensorCache:
    session = native(options(directory, **changes))
    for layer in range(LAYERS):
        session.set_projection(layer, *(0.3 * part for part in projection(layer)))
    return session


def forward(session, generator: torch.Generator, tokens: int) -> list[torch.Tensor]:
    outputs = []
    session.begin_pass(pass_of(tokens, options("").select_queries_max))
    for layer in range(LAYERS):
        keys, values, query = (
            torch.randn(2, heads, tokens, HEAD_DIM, generator=generator)
            for heads in (KV_HEADS, KV_HEADS, HEADS)
        )
        session.append(layer, keys, values)
        outputs.append(session.attend(layer, query, 0.125))
    return outputs


def lived(session) -> tuple[list[torch.Tensor], list[list[list[int]]]]:
    """What 20 steps after a prompt attend and choose."""
    generator = torch.Generator().manual_seed(3)
    outputs, chosen = [], []
    for tokens in (150, *[1] * 20, 3):
        outputs += forward(session, generator, tokens)
        if tokens < 4:
            chosen += [[list(of) for of in session.last_selection(i)] for i in range(LAYERS)]
    return outputs, chosen


@pytest.mark.parametrize("score", ["sum", "max", "mass", "max_mass"])
def test_beside_a_device_the_host_chooses_the_same(tmp_path, score):
    mine, theirs = (
        lived(opened(tmp_path, summary_dtype="int4", score=score, **place))
        for place in ({}, {"device": "host"})
    )
    assert mine[1] == theirs[1]
    for own, other in zip(mine[0], theirs[0], strict=True):
        torch.testing.assert_close(own, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("score", ["sum", "mass"])
def test_most_of_the_choice_is_that_of_finer_rows(tmp_path, score):
    of = {
        dtype: lived(opened(tmp_path, summary_dtype=dtype, score=score))[1]
        for dtype in ("model", "int8", "int4")
    }

    def same(dtype: str) -> float:
        pairs = [
            (set(mine), set(theirs))
            for layer, exact in zip(of[dtype], of["model"], strict=True)
            for mine, theirs in zip(layer, exact, strict=True)
        ]
        return sum(len(a & b) for a, b in pairs) / sum(len(b) for _, b in pairs)

    assert same("int8") > 0.95 and same("int8") > same("int4") > 0.6


def test_rows_take_half_of_int8s_bytes_and_a_scale(tmp_path):
    held = {}
    for dtype in ("int8", "int4"):
        session = opened(tmp_path, summary_dtype=dtype)
        forward(session, torch.Generator().manual_seed(1), 4096 + 8)
        held[dtype] = session.ledger()["summary"]
        need = _C.memory_need(session_options(tmp_path, dtype), 2, 4096 + 8, 4096)
        assert need["summary"] == held[dtype]
        # Projections too take half.
        assert need["projections"] == session.ledger()["projections"]
        assert need["projections"] == LAYERS * 2 * KV_HEADS * HEAD_DIM * 16 * (
            4 if dtype == "int8" else 2
        )
        session.close()
    assert held["int8"] == LAYERS * 2 * 4096 * (16 + 4)
    assert held["int4"] == LAYERS * 2 * 4096 * (8 + 4)


def session_options(directory, dtype: str) -> _C.CacheOptions:
    target = _C.CacheOptions()
    for name, value in vars(options(directory, summary_dtype=dtype)).items():
        setattr(target, name, value)
    return target


def test_other_rows_are_refused(tmp_path):
    told = "summary.dtype: must be left out where summary.kind is mean"
    with pytest.raises(ValueError, match=told):
        native(options(tmp_path, rows="mean", summary_dtype="int4", group_tokens=16))


def test_two_stages_are_refused(tmp_path):
    told = "summary.coarse_rank: must be left out where summary.dtype is"
    with pytest.raises(ValueError, match=told):
        native(options(tmp_path, summary_dtype="int4", score_columns=4))
