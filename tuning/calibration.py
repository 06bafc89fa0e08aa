"""Calibration of a model: projections, and what recall each layer has at each rank.

Three passes (KVSwap, section 3.2 and appendix A.1): two over samples that the projections are
fitted to, for queries as the layer before predicts them and as they are, and one over other
samples, on which the chosen groups' attention mass is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvswap_torch.config import ModelIdentity
from kvswap_torch.projection import Pair
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.look_ups import sources
from kvswap_torch.tuning.moments import LayerMoments
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.recall import (
    QUERIES,
    Choice,
    RecallTable,
    Steps,
    decoded_positions,
    rank_grid,
)
from kvswap_torch.tuning.samples import Sample

KINDS = ("query_aware", "svd_keys")
SUMMARY_DTYPES = ("model", "int8", "int4")
FEW_QUERIES = 4  # per element of a key; fewer in focus make a poor estimate of their moment


@dataclass(frozen=True)
class CalibrationOptions:
    """What to measure.

    Parameters
    ----------
    choice
        How groups are chosen.
    kinds
        Projections to compare; the first is the one to use.
    rank_max
        The largest rank to measure; None: 256, or the keys' width if that is less.
    steps_max
        Decoded tokens of a sample that recall is measured at, evenly among them.
    """

    choice: Choice = field(default_factory=Choice)
    kinds: tuple[str, ...] = KINDS
    rank_max: int | None = None
    steps_max: int = 64

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"calibration: kinds must be among {KINDS}, got {self.kinds}")
        if (self.rank_max is not None and self.rank_max < 1) or self.steps_max < 1:
            raise ValueError(
                "calibration: rank_max and steps_max must be positive, got "
                f"{self.rank_max} and {self.steps_max}"
            )


@dataclass(frozen=True)
class Calibration:
    """What was measured of one model.

    Parameters
    ----------
    pairs
        By (kind, query) one projection a layer on disk, with a column for the largest rank. Query
        is ``predicted`` or ``true``: what the projection is made for.
    tables
        Recall by (kind, summary dtype, query).
    energy
        For each layer the share of the scores' variance that the first r columns keep.
    tokens_fitted, tokens_measured, steps_measured
        How much text it rests on; steps are the decoded tokens among those measured.
    warnings
        What to know before trusting it.
    """

    identity: ModelIdentity
    shape: ModelShape
    choice: Choice
    pairs: dict[tuple[str, str], list[Pair]]
    tables: dict[tuple[str, str, str], RecallTable]
    energy: list[list[float]]
    tokens_fitted: int
    tokens_measured: int
    steps_measured: int
    warnings: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The projection to use."""
        return next(iter(self.pairs))[0]

    @property
    def summary_dtypes(self) -> tuple[str, ...]:
        """The summary's precisions that were measured with it."""
        return tuple(d for d in SUMMARY_DTYPES if (self.kind, d, "true") in self.tables)


def calibrate(
    model: Any,
    fitted: Sequence[Sample],
    held_out: Sequence[Sample],
    options: CalibrationOptions | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Fits projections on some samples and measures them on others.

    Parameters
    ----------
    model
        A transformers model that `kvswap_torch.KVSwapCache` supports.
    fitted, held_out
        At least one sample each. Text with facts and questions about them laid in serves far better
        than plain text: directions that only retrieval uses are not seen otherwise.

    Raises
    ------
    ValueError
        When there is nothing to fit or to measure.
    UnsupportedModelError
        When the model's cache cannot live on disk.
    """
    options = options or CalibrationOptions()
    if not fitted or not held_out:
        raise ValueError(
            "calibrate: must have at least one sample to fit and one to measure, got "
            f"{len(fitted)} and {len(held_out)}; give more text"
        )
    calibrator = Calibrator(model)
    shape = calibrator.parts.shape
    ranks = rank_grid(shape.width, options.rank_max or min(256, shape.width))
    pairs: dict[tuple[str, str], list[Pair]] = {}
    for query in QUERIES:
        moments = gather_moments(calibrator, fitted, query, progress, options.choice.score)
        for kind in options.kinds:
            pairs[kind, query] = [m.pair(kind, ranks[-1]) for m in moments]
    pairs = {(kind, query): pairs[kind, query] for kind in options.kinds for query in QUERIES}
    # Without kernels for int4 a device would have the host score.
    dtypes = SUMMARY_DTYPES if calibrator.parts.device.type == "cpu" else SUMMARY_DTYPES[:2]
    tables = {
        (kind, dtype, query): RecallTable(made, ranks, dtype, query)
        for (kind, query), made in pairs.items()
        for dtype in (dtypes if kind == options.kinds[0] else dtypes[:1])
    }
    measure_recall(calibrator, held_out, list(tables.values()), options, progress)
    return Calibration(
        identity=calibrator.parts.identity,
        shape=shape,
        choice=options.choice,
        pairs=pairs,
        tables=tables,
        energy=[m.energy(p) for m, p in zip(moments, pairs[options.kinds[0], "true"], strict=True)],
        tokens_fitted=sum(len(sample.ids) for sample in fitted),
        tokens_measured=sum(len(sample.ids) for sample in held_out),
        steps_measured=sum(
            min(options.steps_max, len(sample.ids) - sample.focus) for sample in held_out
        ),
        warnings=_warnings(moments[0], held_out, options.choice),
    )


def gather_moments(
    calibrator: Calibrator,
    samples: Sequence[Sample],
    query: str = "predicted",
    progress: Progress | None = None,
    score: str = "sum",
) -> list[LayerMoments]:
    """One `LayerMoments` a layer on disk, for queries ``predicted`` or ``true``."""
    shape = calibrator.parts.shape
    moments = [LayerMoments(shape.width, score) for _ in range(shape.layers)]

    def add(seen: Observed, sample: Sample) -> None:
        if query == "true":
            seen = dataclasses.replace(seen, predicted=None)
        moments[seen.layer].add(seen, sample)

    read_samples(calibrator, samples, add, f"fitting to {query} queries", progress)
    return moments


def measure_recall(
    calibrator: Calibrator,
    samples: Sequence[Sample],
    tables: Sequence[RecallTable],
    options: CalibrationOptions,
    progress: Progress | None = None,
) -> None:
    """Counts the samples in every table."""

    def measure(seen: Observed, sample: Sample) -> None:
        positions = decoded_positions(len(sample.ids), sample.focus, options.steps_max)
        steps = Steps(seen, positions, options.choice, wanted=sources(sample.ids, positions))
        for table in tables:
            table.add(seen, steps)

    read_samples(calibrator, samples, measure, "measuring recall", progress)


def read_samples(
    calibrator: Calibrator,
    samples: Sequence[Sample],
    observe: Callable[[Observed, Sample], None],
    what: str,
    progress: Progress | None,
) -> None:
    """Lets the model read one after another; the observer is called for each layer of each."""
    for number, sample in enumerate(samples):
        if progress is not None:
            progress(what, number, len(samples))
        calibrator.read(sample, lambda seen, sample=sample: observe(seen, sample))
    if progress is not None:
        progress(what, len(samples), len(samples))


def _warnings(moments: LayerMoments, held_out: Sequence[Sample], choice: Choice) -> tuple[str, ...]:
    warnings = []
    if moments.queries < FEW_QUERIES * moments.width:
        warnings.append(
            f"calibration: at least {FEW_QUERIES * moments.width} decoded tokens serve keys of "
            f"{moments.width} elements, got {moments.queries}; give more text"
        )
    attended = choice.group_tokens * choice.groups_max
    longest = max(len(sample.ids) for sample in held_out)
    if longest < 4 * attended:
        warnings.append(
            f"calibration: samples should be several times as long as the {attended} tokens that a "
            f"step attends, the longest has {longest}; recall in longer contexts will be lower"
        )
    return tuple(warnings)
