"""Tokens that were valid when they came and are padding from some pass on."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch

from tests.how_long import lives
from tests.python.reference_methods import METHODS
from tests.python.test_session import (
    BACK_ENDS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    OF_GROUPS,
    live,
    native,
    options,
    projection,
)


@pytest.mark.parametrize("rows", OF_GROUPS)
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(2, 4)))
def test_random_operations_choose_as_the_reference(tmp_path, seed, rows, heads):
    rng = random.Random(seed)
    scores = ["sum", "max", "mass"] if rows == "low_rank" else ["sum", "max"]
    made = options(
        tmp_path,
        rows=rows,
        heads=heads,
        score=rng.choice(scores),
        exact_layers=rng.choice([[], [1]]),
        group_tokens=rng.choice([1, 3, 4, 16]),
        groups_max=rng.choice([1, 3, 8]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 1, 6]),
        select_queries_max=rng.choice([1, 4]),
        **BACK_ENDS[(seed + len(rows)) % len(BACK_ENDS)],
    )
    live(made, rng, seed, pads_later=True)


@pytest.mark.parametrize("keeper", ["observed", "heavy", "given", "arkv"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(2, 4)))
def test_random_operations_with_kept_tokens(tmp_path, seed, keeper, heads):
    rng = random.Random(seed)
    arkv = {"keep_variance": 263.8, "keep_slack": 0.75, "keep_ratio": rng.choice([0.0, 0.3, 1.0])}
    made = options(
        tmp_path,
        rows=rng.choice(["low_rank", "box", "none"]),
        heads=heads,
        score="sum",
        keeper=keeper,
        keep_tokens=rng.choice([16, 30]),
        keep_window=32 if keeper == "given" else rng.choice([1, 5, 20]),
        keep_interval=0 if keeper == "arkv" else rng.choice([3, 8]),
        **(arkv if keeper == "arkv" else {}),
        group_tokens=rng.choice([1, 3, 4]),
        groups_max=rng.choice([1, 3]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4]),
        select_queries_max=rng.choice([1, 4]),
        **BACK_ENDS[seed % len(BACK_ENDS)],
    )
    live(made, rng, seed, pads_later=True)


#: What attends from pages that are no group's, or from what is left in memory.
APART = {
    "kept": {"keeper": "observed", "keep_tokens": 40, "keep_window": 8, "keep_interval": 4},
    "kept in e4m3": {"rows": "none", "keeper": "arkv", "keep_tokens": 40, "keep_ratio": 0.3},
    "dropped": {"rows": "none", "keeper": "observed", "keep_tokens": 40, "directory": ""},
    "clusters": {
        "rows": "centroid",
        "grouping": "clusters",
        "cluster_tokens": 4,
        "cluster_tokens_max": 10,
        "pending_tokens": 5,
    },
    "groups": {},
    "all": {"groups_max": 400, "pages_max": 400},
}

HOST_ALONE = ("clusters", "dropped")
KINDS = [(k, d) for k in APART for d in ("cpu", "host") if d == "cpu" or k not in HOST_ALONE]


def outputs(
    made,
    pads: torch.Tensor | None,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    exact: bool = True,
) -> list[torch.Tensor]:
    """Of the passes after some tokens became padding, whose values `change` has made others.

    Without `exact` of those alone that select.
    """
    session = native(made)
    if METHODS[made.rows].takes_projections:
        for layer in range(LAYERS):
            session.set_projection(layer, *projection(layer))
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    found, valid, batch = [], torch.ones(2, 0, dtype=torch.bool), 2
    for step, tokens in enumerate((150, 1, 2, 1, 40, 1, 1, 70, 1, 1, 1)):
        if pads is not None and step == 3:
            valid &= ~pads[:, : valid.shape[1]]
            session.declare_held(valid)
        session.begin_pass("prefill" if tokens > 4 else "decode")
        for layer in range(LAYERS):
            keys, values, query = (
                draw(batch, heads, tokens, HEAD_DIM) for heads in (KV_HEADS, KV_HEADS, HEADS)
            )
            if step == 0 and change is not None:
                hidden = other_of_pads()[:, None, :tokens, None]
                values = torch.where(hidden, change(values), values)
            output = session.extend(layer, query, keys, values, 0.125)
            if step >= 3 and (exact or tokens <= 4):
                found.append(output)
        valid = torch.cat([valid, torch.ones(batch, tokens, dtype=torch.bool)], 1)
    return found


def other_of_pads() -> torch.Tensor:
    """In the first sequence the first ones and some in the middle, in the other one many apart."""
    pads = torch.zeros(2, 153, dtype=torch.bool)
    pads[0, :3], pads[0, 60:77], pads[1, 20:140:3] = True, True, True
    return pads


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_what_became_padding_is_attended_no_more(tmp_path, kind, heads, device):
    """Values choose nothing: what they are at such tokens can be seen by attention alone."""
    made, pads = apart(tmp_path, kind, heads, device), other_of_pads()
    negated = torch.neg  # as large: e4m3 scales pages
    one, other = outputs(made, pads), outputs(made, pads, negated)
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(one[0], outputs(made, None, negated)[0])


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize(("kind", "device"), [each for each in KINDS if "e4m3" not in each[0]])
@pytest.mark.pairs
def test_no_value_of_what_became_padding_reaches_a_selection(tmp_path, kind, heads, device, value):
    """A weight of zero would not hide it. Of e4m3 a page has one scale, which it would change."""
    made, pads = apart(tmp_path, kind, heads, device), other_of_pads()
    fill = functools.partial(torch.full_like, fill_value=value)
    one, other = (outputs(made, pads, change, exact=False) for change in (None, fill))
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


def apart(tmp_path, kind: str, heads: str, device: str):
    made = options(tmp_path, heads=heads, groups_max=6, pages_max=24, score="sum")
    for name, value in APART[kind].items():
        setattr(made, name, value)
    made.device = device
    if METHODS[made.rows].takes_projections is False:
        made.ranks = []
    return made


def test_what_came_as_padding_stays_so_and_what_became_it_may_come_back(tmp_path):
    session = native(options(tmp_path))
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[0, :7] = False
    with pytest.raises(ValueError, match=r"declare_held: the mask must be of what is held, 0 x 0"):
        session.declare_held(valid)
    session.begin_pass("prefill", valid)
    for layer in range(LAYERS):
        keys = torch.randn(2, KV_HEADS, 60, HEAD_DIM)
        session.extend(layer, torch.randn(2, HEADS, 60, HEAD_DIM), keys, keys, 0.125)
    with pytest.raises(ValueError, match="position 0 of sequence 0 must stay padding, as it came"):
        session.declare_held(torch.ones_like(valid))
    with pytest.raises(ValueError, match=r"of what is held, 2 x 60 positions, got 2 x 59"):
        session.declare_held(valid[:, 1:])
    with pytest.raises(ValueError, match=r"bool tensor, got \[2, 60\] of Long"):
        session.declare_held(valid.long())
    query, keys = torch.randn(2, HEADS, 1, HEAD_DIM), torch.randn(2, KV_HEADS, 1, HEAD_DIM)
    outputs = []
    for told in (valid, valid & (torch.arange(60) < 50), valid):
        session.declare_held(told)
        session.begin_pass("prefill")
        outputs.append(session.extend(0, query, keys, keys, 0.125))
        session.extend(1, query, keys, keys, 0.125)
        session.crop(60)
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
