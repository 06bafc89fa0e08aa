"""Recall: of the choices that the engine makes, against the model's own softmax."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from python.reference_session import Options, ReferenceSession

from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.recall import (
    Choice,
    GroupScores,
    RecallTable,
    Steps,
    decoded_positions,
    kept_rows,
    rank_grid,
    worth,
)
from tests.selections import assert_same_choices

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 8, 80
WIDTH = KV_HEADS * HEAD_DIM
CHOICE = Choice(group_tokens=4, groups_max=3, sink_tokens=6, tail_tokens=10)


def seen(predicted: bool = True, seed: int = 0) -> Observed:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, TOKENS, HEAD_DIM, generator=generator)

    query = 3 * draw(HEADS)
    near = query + draw(HEADS) if predicted else None
    return Observed(0, query, near, draw(KV_HEADS), HEAD_DIM**-0.5)


def full_pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.eye(WIDTH), torch.eye(WIDTH)


@pytest.mark.parametrize("score", ["sum", "mass", "max_mass"])
def test_steps_choose_what_a_session_chooses(score):
    """Decodes token by token with the reference session and compares groups."""
    sample, read = seen(), 40
    positions = torch.arange(read, TOKENS)
    generator = torch.Generator().manual_seed(3)
    pair = tuple(torch.randn(WIDTH, 5, generator=generator) for _ in range(2))
    options = Options(
        layers=1,
        query_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        ranks=[5],
        group_tokens=4,
        groups_max=3,
        pages_max=24,
        sink_tokens=6,
        tail_tokens=10,
        score=score,
        look_ahead="trust",
    )
    session = ReferenceSession(options)
    session.set_projection(0, *pair)
    session.append(0, sample.keys[:, :, :read], sample.keys[:, :, :read])

    session.begin_pass("decode")
    choice = dataclasses.replace(CHOICE, score=score)
    steps = Steps(sample, positions, choice)
    scores = GroupScores(sample, sample.predicted, pair, positions, choice)
    chosen = steps.select(scores.at(5, "model", [steps])[0])
    for row, t in zip(chosen.tolist(), positions.tolist(), strict=True):
        session.look_ahead(0, sample.predicted[:, :, t : t + 1])
        one = sample.keys[:, :, t : t + 1]
        session.append(0, one, one)
        session.attend(0, sample.query[:, :, t : t + 1], sample.scale)
        assert_same_choices([sorted(row)], session.last_selection(0), session.last_judged(0))


def test_recall_grows_with_groups_and_is_one_when_all_are_chosen():
    sample, positions = seen(), torch.arange(40, TOKENS)
    scores = torch.rand(len(positions), TOKENS // 4, generator=torch.Generator().manual_seed(1))
    values = []
    for groups in (1, 4, 8, 40):
        choice = Choice(4, groups, 6, 10)
        steps = Steps(sample, positions, choice)
        values.append(steps.recall(steps.select(scores)))
        assert values[-1] <= steps.best_recall() + 1e-6
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1.0)


def test_what_is_found_is_what_heads_look_up():
    sample, positions = seen(), torch.arange(40, TOKENS)
    wanted = torch.zeros(len(positions), TOKENS, dtype=torch.bool)
    wanted[:, 8:24] = True
    steps = Steps(sample, positions, Choice(4, 40, 6, 10), wanted=wanted)
    every = torch.arange(steps.groups).expand(len(positions), -1)
    torch.testing.assert_close(steps.found(every), steps.sought())
    assert 0 < steps.found(every[:, :4]).sum() < steps.sought().sum()


def test_worth_gives_columns_to_layers_that_seek():
    held = [{4: 0.5, 8: 0.6}, {4: 0.5, 8: 0.6}]
    tables = worth(held, [{4: 0.0, 8: 0.0}, {4: 0.25, 8: 0.75}])
    assert tables[0] == pytest.approx({4: 0.1, 8: 0.12})
    assert tables[1] == pytest.approx({4: 0.1 + 0.8 * 0.5, 8: 0.12 + 0.8 * 1.5})
    assert worth(held, []) == held


def test_few_groups_find_less():
    sample, positions = seen(), torch.arange(40, TOKENS)
    wanted = torch.zeros(len(positions), TOKENS, dtype=torch.bool)
    wanted[:, 8:24] = True
    choice = Choice(4, 8, 6, 10)
    table = RecallTable([full_pair()] * 2, (WIDTH,), query="true")
    steps = Steps(sample, positions, choice, wanted=wanted)
    for _ in range(3):  # samples of the first layer; the second has none
        table.add(sample, steps)
    scores = GroupScores(sample, sample.query, full_pair(), positions, choice)
    of_groups = scores.at(WIDTH, "model", [steps])[0]
    few = steps.found(steps.select(of_groups, choice.groups_max // 4))
    assert 0 < few.sum() < steps.found(steps.select(of_groups)).sum()
    share = (few / steps.sought())[steps.sought() > 0].mean().item()
    assert table.found_by_few() == pytest.approx([share, 0.0])


def recall_of(sample: Observed, query: str) -> tuple[dict[int, float], float]:
    table = RecallTable([full_pair()], (4, WIDTH), query=query)
    table.add(sample, Steps(sample, torch.arange(40, TOKENS), CHOICE))
    return table.recall()[0], table.best()[0]


def test_table_tells_predicted_from_true_queries():
    predicted, best = recall_of(seen(), "predicted")
    true, same = recall_of(seen(), "true")
    assert predicted[WIDTH] < true[WIDTH] <= best == same
    assert set(true) == {4, WIDTH}


def test_without_a_prediction_the_true_query_chooses():
    sample = seen(predicted=False)
    assert recall_of(sample, "predicted") == recall_of(sample, "true")


@pytest.mark.parametrize(("dtype", "most"), [("int8", 127), ("int4", 7)])
def test_rows_of_whole_numbers_are_within_half_a_step(dtype, most):
    rows = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    error = (kept_rows(rows, dtype) - rows).abs()
    assert (error <= rows.abs().amax(1, keepdim=True) / most / 2 + 1e-7).all()
    assert not kept_rows(torch.zeros(2, 3), dtype).any()


def test_decoded_positions():
    assert decoded_positions(10, 6, 100).tolist() == [6, 7, 8, 9]
    assert decoded_positions(1000, 500, 3).tolist() == [500, 750, 999]


def test_rank_grid_ends_with_the_most():
    assert rank_grid(20) == (4, 8, 12, 16, 20)
    assert rank_grid(1024, 64)[-1] == 64
    assert rank_grid(4) == (4,)
