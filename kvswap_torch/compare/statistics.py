"""Means with an interval, from few documents with several samples each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLED = 2000
SHARE = 0.95
SEED = 20260

Interval = tuple[float, float, float]
"""Mean, lower and upper end."""


def bootstrap(documents: Sequence[Sequence[float]], seed: int = SEED) -> Interval | None:
    """The mean over all samples and its interval, resampling whole documents.

    Samples of one document are not independent, so documents are what is drawn again (cluster
    bootstrap, percentiles). With one document there is nothing to draw from: the interval is the
    mean alone, and says nothing.

    Parameters
    ----------
    documents
        Samples of each; documents without any are left out.

    Returns
    -------
    tuple or None
        None without samples.
    """
    kept = [np.asarray(samples, dtype=np.float64) for samples in documents if len(samples)]
    if not kept:
        return None
    sums = np.array([samples.sum() for samples in kept])
    counts = np.array([len(samples) for samples in kept])
    drawn = np.random.default_rng(seed).integers(len(kept), size=(RESAMPLED, len(kept)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return tuple(round(float(x), 5) for x in (sums.sum() / counts.sum(), low, high))


def paired(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], seed: int = SEED
) -> Interval | None:
    """The mean of one less the other, sample by sample, and its interval.

    Raises
    ------
    ValueError
        When the two do not have the same documents and samples.
    """
    if [len(samples) for samples in one] != [len(samples) for samples in other]:
        raise ValueError(
            f"paired: must have the same samples in each document, got "
            f"{[len(s) for s in one]} and {[len(s) for s in other]}"
        )
    differences = [
        [a - b for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(one, other, strict=True)
    ]
    return bootstrap(differences, seed)


def interval(value: Interval | None, form: str = ".2f") -> str:
    """``0.95 (0.90 to 1.00)``."""
    if value is None:
        return "-"
    return f"{value[0]:{form}} ({value[1]:{form}} to {value[2]:{form}})"
