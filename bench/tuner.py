"""The tuner against measurement: is its cost model right, and is its choice the best one?

    python -m bench tuner --path build --context 16384 --batch 4

Tunes, then measures many settings of the same budget by replaying the choices that calibration
recorded. Prints predicted against measured time, and the tuned setting's speed against the best
measured one that finds as much. Settings are measured in random order, the best of them again in
turn with the tuned one.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from kvswap_torch import SwapConfig, format_bytes
from kvswap_torch.cli.load import load_model
from kvswap_torch.tuning.api import tune
from kvswap_torch.tuning.cli import Bars
from kvswap_torch.tuning.costs import SettingCosts
from kvswap_torch.tuning.pipeline import TuneOptions, projection_beside
from kvswap_torch.tuning.result import TuneResult
from kvswap_torch.tuning.solver import Setting, Solution, solutions
from kvswap_torch.tuning.synthetic import StepTime, SyntheticDecode, median_step
from kvswap_torch.tuning.traffic import Replayed
from tools.reference_model.place import MODEL

WARM_UP = 24  # steps in which the reuse buffer fills
STEPS = 24
FINALISTS = 8
ROUNDS = 7  # of the finalists: the best of many noisy times is too good
NEAR = 0.2


def measure(
    result: TuneResult, costs: SettingCosts, setting: Setting, config: SwapConfig, path: Path
) -> StepTime:
    """Median step of one setting."""
    wanted = dataclasses.replace(costs.config(setting), source=config.source)
    if result.options.device:
        wanted = wanted.with_settings({"storage.simulated_device": result.options.device})
    with SyntheticDecode(result.measured.model, path, wanted, costs.batch, costs.context) as decode:
        place = (setting.group_tokens, costs.context, costs.batch)
        trace = Replayed(costs.traffic, *place, wanted.selection.top_k_groups)
        return median_step(decode.steps(STEPS, trace, WARM_UP))


def candidates(result: TuneResult, costs: SettingCosts, count: int) -> list[Solution]:
    """Settings within the budget: first all that find as much as the tuned one must."""
    solved = result.solved[0]
    everything = [
        found
        for found in solutions(solved.grid, costs, result.budget_bytes)
        if not costs.is_whole(found.setting)
    ]
    rng = random.Random(0)
    rng.shuffle(everything)
    everything.sort(key=lambda found: found.recall < solved.grid.recall_min)
    return everything[:count]


def compare(
    result: TuneResult, path: Path, count: int, passes: int, console: Console
) -> dict[str, Any]:
    """Measures `count` settings and the tuned one."""
    solved = result.solved[0]
    costs, tuned = solved.costs, solved.chosen.setting
    chosen = candidates(result, costs, count)
    order = list(chosen)
    random.Random(1).shuffle(order)
    with projection_beside(result.config, result.measured.calibrated) as config:
        times: dict[Setting, list[StepTime]] = {found.setting: [] for found in order}
        for found in track(order * passes, "measuring settings", console=console):
            times[found.setting].append(measure(result, costs, found.setting, config, path))
        measured = {setting: median_step(each) for setting, each in times.items()}
        good = [found for found in chosen if found.recall >= solved.grid.recall_min]
        good.sort(key=lambda found: measured[found.setting].total)
        finalists = list(dict.fromkeys([tuned, *(found.setting for found in good[:FINALISTS])]))
        again: dict[Setting, list[float]] = {setting: [] for setting in finalists}
        for _ in track(range(ROUNDS), "the best again", console=console):
            for setting in finalists:
                again[setting].append(measure(result, costs, setting, config, path).total)
    final = {setting: statistics.median(each) for setting, each in again.items()}
    best = min(final, key=final.get)
    rows = [_row(costs, found, measured[found.setting]) for found in chosen]
    errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows]
    greedy = solved.greedy.setting
    return {
        "settings_measured": len(rows),
        "as_good_as_tuned": len(good),
        "error_median": round(statistics.median(errors), 4),
        "error_p90": round(sorted(errors)[int(0.9 * len(errors))], 4),
        "within_20_percent": round(sum(error <= NEAR for error in errors) / len(errors), 4),
        "tuned": _told(tuned, final[tuned]),
        "best": _told(best, final[best]),
        "tuned_speed_of_best": round(final[best] / final[tuned], 4),
        "greedy": _told(greedy, final.get(greedy)),
        "settings": rows,
    }


def _told(setting: Setting, seconds: float | None) -> dict[str, Any]:
    told: dict[str, Any] = dataclasses.asdict(setting)
    return told if seconds is None else told | {"ms": round(1e3 * seconds, 3)}


def _row(costs: SettingCosts, found: Solution, time: StepTime) -> dict[str, Any]:
    cost = costs.cost(found.setting)
    predicted = {name: round(1e3 * seconds, 3) for name, seconds in cost.parts.items()}
    measured = {name: round(1e3 * seconds, 3) for name, seconds in time.parts.items()}
    loads = time.counts["groups_loaded"] / max(1, time.counts["groups_attended"])
    return dataclasses.asdict(found.setting) | {
        "predicted_ms": round(1e3 * cost.seconds, 3),
        "measured_ms": round(1e3 * time.total, 3),
        "recall": round(found.recall, 4),
        "predicted_hits": round(cost.hit_rate, 3),
        "measured_hits": round(1 - loads, 3),
        "predicted_parts_ms": predicted,
        "measured_parts_ms": measured,
    }


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = MODEL,
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("build"),
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 16384,
    batch: Annotated[int, typer.Option(help="sequences")] = 4,
    memory_share: Annotated[str, typer.Option(help="budget, of the full cache")] = "1/13",
    device: Annotated[str, typer.Option(help="modelled device: nvme, ufs, emmc")] = "",
    settings: Annotated[int, typer.Option(help="settings to measure")] = 60,
    passes: Annotated[int, typer.Option(help="over all settings; slow spells hit a few")] = 3,
    work: Annotated[Path | None, typer.Option(help="keep measurements here")] = None,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console(width=150)
    network = load_model(str(model))
    from rich.progress import Progress

    from kvswap_torch.hf.families import model_parts

    full = batch * model_parts(network).shape.kv_bytes(context)
    began = time.monotonic()
    with Progress(console=console) as progress:
        result = tune(
            network,
            context,
            batch,
            int(full * Fraction(memory_share)),
            path,
            tokenizer=str(model),
            options=TuneOptions(device=device),
            work=work,
            progress=Bars(progress),
        )
    seconds = time.monotonic() - began
    results = {
        "machine": machine.describe(path),
        "context": context,
        "batch": batch,
        "device": device or "local disk",
        "budget_bytes": result.budget_bytes,
        "threads": torch.get_num_threads(),
        # With a work folder some of it may have been measured before.
        "tune_seconds": None if work else round(seconds, 1),
        "disk_model_residual": result.measured.disk.residual,
    } | compare(result, path, settings, passes, console)
    _print(console, results)
    if out:
        console.print(f"wrote {machine.write(out, results).name}")


def _print(console: Console, results: dict[str, Any]) -> None:
    table = Table(
        title=f"context {results['context']:,}, batch {results['batch']}, {results['device']}, "
        f"{format_bytes(results['budget_bytes'])}"
    )
    columns = ("group_tokens", "rank", "capacity", "recall", "predicted_ms", "measured_ms")
    for column in (*columns, "predicted_hits", "measured_hits"):
        table.add_column(column.replace("_", " "), justify="right")
    for row in sorted(results["settings"], key=lambda row: row["measured_ms"])[:12]:
        table.add_row(*(str(row[name]) for name in (*columns, "predicted_hits", "measured_hits")))
    console.print(table)
    console.print(
        f"predictions off by "
        f"{results['error_median']:.1%} (median), {results['error_p90']:.1%} (nine in ten); "
        f"{results['within_20_percent']:.0%} within 20 %"
    )
    console.print(
        f"tuned setting {results['tuned']}, best measured {results['best']}: "
        f"{results['tuned_speed_of_best']:.1%} of its speed"
    )


if __name__ == "__main__":
    typer.run(main)
