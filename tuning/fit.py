"""Fits of costs: no work gives time back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 200
STEP_FIRST = 0.5  # in natural logarithms
STEP_LAST = 1e-3


def fit_nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients c >= 0 that make ``rows @ c`` close to `values`, in relative terms.

    Parameters
    ----------
    rows
        ``[points][features]``; a column of zeros gets 0.
    values
        ``[points]``, positive.
    """
    matrix, target = np.asarray(rows, dtype=float), np.asarray(values, dtype=float)
    weight = 1 / np.maximum(target, 1e-3 * max(target.max(initial=0.0), 1e-12))
    matrix, target = matrix * weight[:, None], target * weight
    norms = np.linalg.norm(matrix, axis=0)
    active = [i for i, norm in enumerate(norms) if norm > 0]
    found = np.zeros(matrix.shape[1])
    while active:
        scaled = matrix[:, active] / norms[active]
        solved = np.linalg.lstsq(scaled, target, rcond=None)[0] / norms[active]
        if solved.min() >= 0:
            found[active] = solved
            break
        active.pop(int(np.argmin(solved * norms[active])))
    return tuple(float(value) for value in found)


def dot(row: Sequence[float], coefficients: Sequence[float]) -> float:
    """The fitted value of one row."""
    return float(sum(a * b for a, b in zip(row, coefficients, strict=True)))


def descend(loss: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """A minimum of `loss` by steps along each axis that halve when none helps."""
    best, least = list(start), loss(start)
    step = STEP_FIRST
    for _ in range(ROUNDS):
        moved = False
        for axis in range(len(best)):
            for sign in (step, -step):
                tried = best[:axis] + [best[axis] + sign] + best[axis + 1 :]
                if (value := loss(tried)) < least:
                    best, least, moved = tried, value, True
        if not moved:
            step /= 2
            if step < STEP_LAST:
                break
    return best
