"""Choices of two implementations: the same, but for groups at the threshold.

Two sums of the same numbers in another order differ in their last bits; which of two groups with
nearly the same score is the last to be chosen is then chance. So a group that only one of the two
chose must have a score that is the threshold's, within rounding; everything above is in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

RELATIVE = 1e-3  # of the threshold
OF_LARGEST = 1e-6  # of the largest score: what a sum of products loses


def beyond_rounding(
    mine: Iterable[int],
    theirs: Iterable[int],
    scores: torch.Tensor,
    count: int,
    relative: float = RELATIVE,
    absolute: float = 0.0,
) -> list[int]:
    """Groups that one of the two chose alone, and that rounding does not account for.

    Parameters
    ----------
    mine, theirs
        Groups that each chose; of several queries those of any of them.
    scores
        ``[groups]`` or ``[queries, groups]``: of one of the two; ``-inf`` where a group may not be
        chosen.
    count
        Groups that each query chooses.
    """
    scores = scores[None] if scores.dim() == 1 else scores
    scores = scores.float()
    best = scores.sort(dim=1, descending=True).values
    threshold = best[:, min(count, scores.shape[1]) - 1]
    finite = scores.masked_fill(~scores.isfinite(), 0.0)
    slack = relative * threshold.abs() + OF_LARGEST * finite.abs().amax(1) + absolute
    at_threshold = ((scores - threshold[:, None]).abs() <= slack[:, None]).any(0)
    return sorted(group for group in set(mine) ^ set(theirs) if not at_threshold[group])


def assert_same_choice(
    mine: Iterable[int], theirs: Iterable[int], scores: torch.Tensor, count: int, **slack: float
) -> bool:
    """Whether the two are equal; differences that rounding does not account for are an error.

    Parameters
    ----------
    slack
        As for `beyond_rounding`.
    """
    mine, theirs = list(mine), list(theirs)
    assert len(set(mine)) == len(mine) and len(set(theirs)) == len(theirs), (mine, theirs)
    wrong = beyond_rounding(mine, theirs, scores, count, **slack)
    assert wrong == [], f"of {sorted(mine)} and {sorted(theirs)} chosen by one alone: {wrong}"
    if scores.dim() == 1 or len(scores) == 1:
        assert len(mine) == len(theirs), (mine, theirs)
    return sorted(mine) == sorted(theirs)


#: What a choice was made by: scores and count, as above; None where everything was chosen.
Judged = tuple[torch.Tensor, int] | None


def assert_same_choices(
    mine: Sequence[Iterable[int]], theirs: Sequence[Iterable[int]], by: Sequence[Judged]
) -> bool:
    """`assert_same_choice` of each sequence; without scores, all must be equal."""
    assert len(mine) == len(theirs) == len(by), (len(mine), len(theirs), len(by))
    same = True
    for own, other, judged in zip(mine, theirs, by, strict=True):
        if judged is None:
            assert list(own) == list(other)
        else:
            same &= assert_same_choice(own, other, *judged)
    return same
