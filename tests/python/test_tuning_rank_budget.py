"""Handing out ranks: never over the budget, no worse than one rank for all, jumps included."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch.errors import BudgetError
from kvswap_torch.tuning.costs import hand_out_ranks

RANKS = (4, 8, 16, 32)


def columns(ranks: tuple[int, ...]) -> int:
    """A budget's measure: a byte a column, and something fixed."""
    return 10 + sum(ranks)


def total(recall, ranks) -> float:
    return sum(table[rank] for table, rank in zip(recall, ranks, strict=True))


curves = st.lists(
    st.lists(st.floats(0, 1), min_size=len(RANKS), max_size=len(RANKS)).map(
        lambda values: dict(zip(RANKS, sorted(values), strict=True))
    ),
    min_size=1,
    max_size=4,
)


@given(curves, st.integers(0, 150))
def test_never_over_the_budget(recall, spare):
    budget = 10 + 4 * len(recall) + spare
    ranks = hand_out_ranks(recall, columns, budget)
    assert columns(ranks) <= budget
    assert all(rank in RANKS for rank in ranks)


@given(curves, st.integers(0, 150))
def test_nothing_more_can_be_gained_in_one_step(recall, spare):
    budget = 10 + 4 * len(recall) + spare
    ranks = hand_out_ranks(recall, columns, budget)
    for layer, rank in itertools.product(range(len(recall)), RANKS):
        raised = ranks[:layer] + (rank,) + ranks[layer + 1 :]
        if rank > ranks[layer] and columns(raised) <= budget:
            assert recall[layer][rank] <= recall[layer][ranks[layer]]


@given(curves, st.integers(0, 150))
def test_within_one_step_of_the_best(recall, spare):
    """On the concave hull greedy is optimal but for the step that no longer fits."""
    budget = 10 + 4 * len(recall) + spare
    ours = total(recall, hand_out_ranks(recall, columns, budget))
    best = max(
        total(recall, ranks)
        for ranks in itertools.product(RANKS, repeat=len(recall))
        if columns(ranks) <= budget
    )
    largest = max(table[32] - table[4] for table in recall)
    assert best - largest - 1e-9 <= ours <= best + 1e-9


def test_the_layer_that_gains_most_is_raised_first():
    recall = [{4: 0.5, 16: 0.52}, {4: 0.4, 16: 0.8}, {4: 0.5, 16: 0.51}]
    assert hand_out_ranks(recall, columns, 10 + 12 + 12) == (4, 16, 4)


def test_a_flat_stretch_before_a_jump_is_stepped_over():
    recall = [{4: 0.4, 8: 0.4, 16: 0.4, 32: 1.0}, {4: 0.4, 8: 0.45, 16: 0.46, 32: 0.47}]
    assert hand_out_ranks(recall, columns, 10 + 36) == (32, 4)


def test_memory_that_gains_nothing_is_left():
    recall = [{4: 0.9, 8: 0.9, 16: 0.88}]
    assert hand_out_ranks(recall, columns, 1000) == (4,)
    assert hand_out_ranks([{4: 0.9, 8: 0.901}], columns, 1000, gain_min=0.01) == (4,)


def test_too_small_a_budget_names_the_minimum():
    with pytest.raises(BudgetError, match=r"\(4, 4\) need 18 bytes.*budget of 17"):
        hand_out_ranks([{4: 0.1}, {4: 0.1}], columns, 17)


@pytest.mark.parametrize("recall", [[], [{}]])
def test_no_rank_to_choose_is_an_error(recall):
    with pytest.raises(ValueError, match="recall of a rank"):
        hand_out_ranks(recall, columns, 100)
