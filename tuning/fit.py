"""Least squares with coefficients that are not negative: no work gives time back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
