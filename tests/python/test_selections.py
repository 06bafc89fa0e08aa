"""The helper that compares choices: what it forgives is rounding at the threshold, nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.other_processors import ROOT, SENSITIVE, lanes
from tests.selections import assert_same_choice, assert_same_choices, beyond_rounding

SCORES = torch.tensor([0.9, 0.5, 0.5000001, 0.4, 0.1, -torch.inf])


def test_equal_choices_are_equal_in_any_order() -> None:
    assert assert_same_choice([0, 2], [2, 0], SCORES, 2)


def test_of_two_groups_at_the_threshold_either_may_be_chosen() -> None:
    assert not assert_same_choice([0, 1], [0, 2], SCORES, 2)


@pytest.mark.parametrize(
    ("theirs", "wrong"),
    [([0, 3], [3]), ([1, 2], [0]), ([0, 5], [5]), ([3, 4], [0, 3, 4])],
)
def test_other_groups_are_wrong(theirs: list[int], wrong: list[int]) -> None:
    assert beyond_rounding([0, 2], theirs, SCORES, 2) == wrong
    with pytest.raises(AssertionError, match="chosen by one alone"):
        assert_same_choice([0, 2], theirs, SCORES, 2)


def test_as_many_must_be_chosen_and_each_once() -> None:
    with pytest.raises(AssertionError):
        assert_same_choice([0, 1, 2], [0, 2], SCORES, 2)
    with pytest.raises(AssertionError):
        assert_same_choice([0, 0], [0, 2], SCORES, 2)


def test_several_queries_have_a_threshold_each() -> None:
    """Group 3 is at the second one's, group 1 at the first one's, group 4 at neither's."""
    scores = torch.stack([SCORES, torch.tensor([0.0, 0.1, 0.2, 0.700001, 0.1, 0.7])])
    assert not assert_same_choice([0, 1, 3], [0, 2, 5], scores, 1 + 1)
    assert beyond_rounding([0, 2, 4, 5], [0, 2, 3, 5], scores, 2) == [4]


def test_scores_near_zero_are_rounded_as_the_largest_is() -> None:
    scores = torch.tensor([1000.0, 1e-5, -1e-5, -900.0])
    assert not assert_same_choice([0, 1], [0, 2], scores, 2)
    with pytest.raises(AssertionError):
        assert_same_choice([0, 1], [0, 2], scores / torch.tensor([1e3, 1.0, 1.0, 1e3]), 2)


def test_without_scores_choices_are_equal() -> None:
    by = [None, (SCORES, 2)]
    assert assert_same_choices([[1, 2], [0, 1]], [[1, 2], [0, 1]], by)
    assert not assert_same_choices([[1, 2], [0, 1]], [[1, 2], [0, 2]], by)
    with pytest.raises(AssertionError):
        assert_same_choices([[1, 2], [0, 1]], [[1, 3], [0, 1]], by)
    with pytest.raises(AssertionError):
        assert_same_choices([[1, 2]], [[1, 2], [0, 1]], by)


@pytest.mark.parametrize(("noise", "is_same"), [(1e-6, True), (0.05, False)])
def test_noise_of_rounding_passes_and_noise_of_a_fault_does_not(
    noise: float, is_same: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    failed = 0
    for _ in range(50):
        scores = torch.rand(400, generator=generator).square()
        other = scores * (1 + noise * torch.randn(400, generator=generator))
        mine, theirs = (each.topk(40).indices.tolist() for each in (scores, other))
        failed += beyond_rounding(mine, theirs, scores, 40) != []
    assert (failed == 0) == is_same


def test_every_level_below_the_usual_one_is_a_lane() -> None:
    assert [lane["KVSWAP_SIMD"] for lane in lanes(["SCALAR", "AVX2", "AVX3"])] == ["SCALAR", "AVX2"]
    assert all("ATEN_CPU_CAPABILITY" in lane for lane in lanes(["SCALAR", "AVX2", "AVX3"]))
    assert lanes(["NEON"]) == [{"ATEN_CPU_CAPABILITY": "default"}]


@pytest.mark.parametrize("test", SENSITIVE)
def test_what_the_lanes_run_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")
