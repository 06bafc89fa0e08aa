"""The tuner: from a model, a disk and a memory limit to a config (KVSwap, section 3.5)."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvswap_torch.config import Prefetch, Selection, Summary, SwapConfig
from kvswap_torch.config.engine import renamed
from kvswap_torch.projection_file import save_projections
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning import work as kept
from kvswap_torch.tuning.ahead import AheadChoice, decide
from kvswap_torch.tuning.calibration import CalibrationOptions, calibrate
from kvswap_torch.tuning.choices import GROUPS, Recorder, record_choices
from kvswap_torch.tuning.costs import Levels, SettingCosts, layers_ahead, make_levels, make_work
from kvswap_torch.tuning.disk import DiskModel
from kvswap_torch.tuning.observe import Calibrator
from kvswap_torch.tuning.probe import DiskFigures, probe_disk
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.recall import RANKS, Choice, rank_grid
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.settings import (
    FORMATS,
    Demand,
    engine_need,
    sharing_capacities,
    sizes_by_format,
    usable_sizes,
)
from kvswap_torch.tuning.solver import Grid, Solved, make_config, pairs_to_solve, solve
from kvswap_torch.tuning.step_model import LoadingModel, StepModel, Work, fit_loading, fit_steps
from kvswap_torch.tuning.timing import (
    ROUNDS,
    STEPS,
    Duration,
    Timing,
    TimingPlan,
    least_duration,
    loading_steps,
    measure,
)
from kvswap_torch.tuning.traffic import (
    Traffic,
    TrafficTable,
    pick_merge_gap,
    pick_replacement,
)
from kvswap_torch.tuning.work import (
    Calibrated,
    from_calibration,
    is_calibrated,
    load_calibrated,
    pick_summary_dtype,
    save_calibrated,
)

RANK_MAX = 128
CAPACITY_SHARES = (
    0.125,
    0.25,
    0.5,
    1.0,
    1.25,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
)  # of the tokens attended
MODELLED = ("nvme", "ufs", "emmc")  # what a session can be slowed down to
PROJECTION_NAME = "projection.safetensors"
CALIBRATION_NAME = "calibration.safetensors"


@dataclass(frozen=True)
class TuneOptions:
    """What a user asks for beside model, limits and folder.

    Parameters
    ----------
    device
        A modelled device (``nvme``, ``emmc``, ``ufs``, ``ufs3``) to tune for instead of the disk.
    solver
        ``exhaustive`` or ``greedy`` (the paper's).
    min_recall
        What groups must find, 0 to 1: a fifth mass, the rest look-ups. 0: what the budget allows.
    exposed_share
        alpha, for the greedy solver: the share of loading that need not be hidden.
    uniform_rank
        One rank for all layers, as in the paper.
    probe_seconds
        Time for the disk.
    sizes
        Group sizes to try.
    records
        What records hold: ``model``, ``fp8``, ``int4``; ``both`` (model and fp8) or ``all`` to
        search them with the group sizes.
    projection
        What the config's projection is: ``query_aware``, ``svd_keys`` (the paper's), or empty for
        the first of `calibration.kinds`. The other one is measured beside it.
    """

    device: str = ""
    solver: str = "exhaustive"
    min_recall: float = 0.0
    exposed_share: float = 0.0
    uniform_rank: bool = False
    probe_seconds: float = 40.0
    sizes: tuple[int, ...] = GROUPS
    records: str = "model"
    projection: str = ""
    calibration: CalibrationOptions = field(
        default_factory=lambda: CalibrationOptions(rank_max=RANK_MAX)
    )


@dataclass(frozen=True)
class Measured:
    """All that was measured; settings for any memory limit follow without measuring again.

    Parameters
    ----------
    model
        The model itself: the engine is asked what its sessions need.
    alignment_bytes
        Of reads on the disk.
    """

    model: Any
    shape: ModelShape
    figures: DiskFigures
    disk: DiskModel
    calibrated: Calibrated
    timings: tuple[Timing, ...]
    steps: StepModel
    loading: LoadingModel
    traffic: TrafficTable
    base: SwapConfig
    date: str

    def costs(
        self, levels: Levels, batch: int, context: int, budget_bytes: int, base: SwapConfig
    ) -> SettingCosts:
        """The cost model of one batch and context; base: `base`, or with another prefetch."""
        demand = Demand(context, batch, budget_bytes)
        return SettingCosts(
            batch=batch,
            context=context,
            shape=self.shape,
            base=base,
            levels=levels,
            steps=self.steps,
            loading=self.loading,
            disk=self.disk,
            traffic=self.traffic,
            need=engine_need(self.model, demand, self.figures.alignment_bytes),
            losses=self.calibrated.losses,
        )


def measure_all(
    model: Any,
    context_max: int,
    batch_max: int,
    path: Path,
    samples: Callable[[], tuple[Sequence[Sample], Sequence[Sample]]],
    folder: kept.WorkFolder,
    options: TuneOptions,
    text_key: str = "",
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> Measured:
    """Probes, calibrates and times, or takes from `folder` what was measured before.

    Parameters
    ----------
    samples
        Gives the samples to fit and to measure; called only when the model must be calibrated.
    text_key
        What tells one text from another.
    tell
        Given a sentence about how long it will take, before it starts.
    """
    calibrator = Calibrator(model)
    shape = calibrator.parts.shape
    machine, identity = kept.machine_key(path), kept.fingerprint(model)
    disk_key = kept.make_key(machine, options.device, str(path))
    calibration = dataclasses.asdict(options.calibration)
    made_of = ("true and predicted selections", identity, text_key, calibration, options.sizes)
    keys = (disk_key, kept.make_key(*made_of))
    if tell is not None:
        tell(str(_least(calibrator, samples, folder, keys, options, batch_max, context_max)))
    figures = _probe(path, folder, keys[0], options, progress)
    calibrated = _calibrate(model, calibrator, samples, folder, keys[1], options, progress)
    base = _base_of(calibrated, options.calibration.choice)
    traffic = TrafficTable(calibrated.choices)
    _, replacement = renamed("replacement", pick_replacement(traffic, context_max))
    base = base.with_settings({"memory.replacement": replacement})
    disk = DiskModel.fit(figures)
    gap = pick_merge_gap(traffic, disk, base, shape.kv_bytes(1) // shape.layers, context_max)
    base = base.with_settings({"storage.coalesce_gap_bytes": gap})
    sizes = usable_sizes(options.sizes, shape, figures.alignment_bytes)
    plan = _timing_plan(batch_max, context_max, shape, calibrated, sizes)
    key = kept.make_key(
        "steps with loads and without, and predictions",
        identity,
        machine,
        options.device,
        base.summary.dtype,
        base.memory.replacement,
        base.storage.coalesce_gap_bytes,
        calibrated.choices.tokens,
        STEPS * ROUNDS,
        str(path),
    )
    device = options.device if options.device in MODELLED else None
    # Selections are overridden while steps are timed, so every prediction may be trusted then.
    timed = base.with_settings({"storage.simulated_device": device, "prefetch.mode": "trust"})
    with projection_beside(timed, calibrated) as config:
        kept_as = (folder, _timings_name(options), key)
        timings = _time(model, path, plan, config, traffic, kept_as, progress)
    return Measured(
        model=model,
        shape=shape,
        figures=figures,
        disk=disk,
        calibrated=calibrated,
        timings=tuple(timings),
        steps=fit_steps(
            [(_work_of(t, config, shape), t.parts) for t in timings if not t.loads],
            len(layers_ahead(config, shape.layers)),
        ),
        loading=fit_loading(loading_steps(timings, config, shape.layers), disk),
        traffic=traffic,
        base=base.with_settings({"selection.max_step_tokens": Selection().max_step_tokens}),
        date=folder.date(_timings_name(options)) or "",
    )


def _base_of(calibrated: Calibrated, choice: Choice) -> SwapConfig:
    """What a calibration says of a config; sizes are solved for."""
    return SwapConfig(
        summary=Summary(
            rank=1,
            dtype=renamed("summary_dtype", calibrated.summary_dtype)[1],
            projection=calibrated.kind,
            projection_file=PROJECTION_NAME,
        ),
        selection=Selection(
            score=renamed("score", choice.score)[1],
            sink_tokens=choice.sink_tokens,
            recent_tokens=choice.tail_tokens,
            max_step_tokens=1,
        ),
        prefetch=Prefetch(mode="verify"),
    )


@contextmanager
def projection_beside(base: SwapConfig, calibrated: Calibrated) -> Iterator[SwapConfig]:
    """A config whose projection file lies in a folder of its own while it is used."""
    with tempfile.TemporaryDirectory() as folder:
        save_projections(
            Path(folder) / PROJECTION_NAME,
            calibrated.pairs_for(base),
            kind=calibrated.kind,
            model=calibrated.identity,
        )
        yield dataclasses.replace(base, source=Path(folder) / "config.json")


def _least(
    calibrator, samples, folder, keys: tuple[str, str], options: TuneOptions, batch_max, context_max
) -> Duration:
    """keys: of the disk and of the calibration. Timings that belong to both count as measured."""
    missing = [
        folder.load(_disk_name(options), keys[0]) is None,
        not is_calibrated(folder.folder / CALIBRATION_NAME, keys[1]),
    ]
    missing.append(any(missing) or folder.date(_timings_name(options)) is None)
    sizes, choice = options.sizes, options.calibration.choice
    ranks = (1, options.calibration.rank_max or RANK_MAX)
    token_bytes = calibrator.parts.shape.kv_bytes(1)
    tokens = choice.group_tokens * choice.groups_max
    plan = TimingPlan(batch_max, context_max, token_bytes, ranks, (sizes[0], sizes[-1]), tokens)
    return least_duration(calibrator.parts, missing, options.probe_seconds, samples, plan)


def _disk_name(options: TuneOptions) -> str:
    return f"disk-{options.device or 'local'}"


def _probe(
    path: Path, folder: kept.WorkFolder, key: str, options: TuneOptions, progress
) -> DiskFigures:
    name = _disk_name(options)
    found = folder.load(name, key)
    if found is not None:
        return DiskFigures.from_json(found)
    figures = probe_disk(
        path, device=options.device, seconds=options.probe_seconds, progress=progress
    )
    folder.save(name, key, figures.to_json())
    return figures


def _calibrate(
    model: Any, calibrator: Calibrator, samples, folder, key: str, options, progress
) -> Calibrated:
    path = folder.folder / CALIBRATION_NAME
    found = load_calibrated(path, key)
    if found is not None:
        return found
    fitted, held_out = samples()
    calibration = calibrate(model, fitted, held_out, options.calibration, progress)
    width = calibrator.parts.shape.width
    recorder = Recorder(
        calibration.pairs[calibration.kind, "true"],
        options.calibration.choice,
        options.sizes,
        rank_grid(width, options.calibration.rank_max or RANKS[-1]),
        pick_summary_dtype(calibration),
    )
    choices = record_choices(calibrator, held_out, recorder, progress)
    calibrated = from_calibration(calibration, choices)
    save_calibrated(path, calibrated, key)
    return calibrated


def _timing_plan(
    batch_max: int, context_max: int, shape: ModelShape, calibrated: Calibrated, sizes: list[int]
) -> TimingPlan:
    choices = calibrated.choices
    ranks = sorted(choices.recall[choices.groups[0]][0])
    return TimingPlan(
        batch_max,
        context_max,
        shape.kv_bytes(1),
        (ranks[0], ranks[-1]),
        (sizes[0], sizes[-1]),
        choices.tokens,
    )


def _time(model, path, plan: TimingPlan, config, traffic, kept_as: tuple, progress) -> list[Timing]:
    folder, name, key = kept_as
    known = [Timing.from_json(fields) for fields in folder.load(name, key) or []]
    for found in measure(model, path, plan, config, traffic, known, progress):
        known = known + found
        folder.save(name, key, [timing.to_json() for timing in known])
    return known


def _timings_name(options: TuneOptions) -> str:
    return f"timings-{options.device or 'local'}"


def _work_of(timing: Timing, base: SwapConfig, shape: ModelShape) -> Work:
    """What a measured step did, by the session's own counts."""
    place, counts = timing.place, timing.counts
    each = 1 / (shape.layers * place.batch)
    traffic = Traffic(
        counts["groups_attended"] * each,
        counts["groups_loaded"] * each,
        counts["reads"] * each,
        counts["bytes_read"] * each,
    )
    config = base.with_settings(
        {"selection.group_tokens": place.group_tokens, "summary.rank": place.rank}
    )
    return make_work(config, shape, place.batch, place.context, [traffic] * shape.layers)


def make_grid(measured: Measured, levels: Levels, context: int, options: TuneOptions) -> Grid:
    """Values to choose from."""
    tokens = measured.calibrated.choices.tokens
    capacities = {int(share * tokens) for share in CAPACITY_SHARES}
    capacities = {each for each in capacities if each < context} | {max(context, tokens)}
    alignment = measured.figures.alignment_bytes
    groups, too_small = sizes_by_format(options.sizes, measured.shape, alignment, options.records)
    return Grid(
        groups=groups,
        records=FORMATS[options.records],
        too_small=too_small,
        ranks=levels.values,
        capacities=tuple(sorted(capacities)),
        shared=sharing_capacities(measured.model, measured.shape.layers, tokens, context),
        exposed_share=options.exposed_share,
        recall_min=options.min_recall,
    )


@dataclass(frozen=True)
class Found:
    """Settings for every batch and context, the largest first.

    Parameters
    ----------
    ahead
        What is predicted, what is trusted, and why.
    """

    config: SwapConfig
    solved: list[Solved]
    levels: Levels
    ahead: AheadChoice


def find_settings(
    measured: Measured, context_max: int, batch_max: int, budget_bytes: int, options: TuneOptions
) -> Found:
    """Settings for every batch and context under a budget; measures nothing.

    Predictions are verified first; then the same is solved with those trusted that lose no answers,
    which is taken where it is clearly faster (`kvswap_torch.tuning.ahead`).

    Raises
    ------
    BudgetError
        When the smallest settings do not fit; names the minimum.
    """
    choices = measured.calibrated.choices
    levels = make_levels(
        choices.recall[choices.middle_group],
        uniform=options.uniform_rank,
    )

    def solve_with(prefetch: Prefetch, grids: Callable[[int], Grid]) -> list[Solved]:
        base = dataclasses.replace(measured.base, prefetch=prefetch)
        return solve(
            lambda batch, context: measured.costs(levels, batch, context, budget_bytes, base),
            grids,
            pairs_to_solve(batch_max, context_max),
            budget_bytes,
            options.solver,
        )

    ahead, solved = decide(
        measured.calibrated,
        solve_with,
        lambda context: make_grid(measured, levels, context, options),
    )
    base = dataclasses.replace(
        measured.base, model=measured.calibrated.identity, prefetch=ahead.prefetch
    )
    return Found(make_config(solved, base), solved, levels, ahead)
