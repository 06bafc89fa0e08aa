"""Decoding side by side: KV on disk against what people would use instead."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.side_by_side.busy import floor_ms_least
from bench.side_by_side.measure import Measurement
from bench.side_by_side.memory_cap import MemoryCap
from bench.side_by_side.plan import (
    BATCHES,
    CONTEXTS,
    DEFAULT,
    LABELS,
    OPTIONAL,
    PRESET,
    Cell,
    Room,
    cells,
    estimate_seconds,
    in_order,
)
from bench.side_by_side.report import FOLDER, print_cell
from bench.side_by_side.roofline import DiskBandwidth, memory_bytes_per_second
from bench.side_by_side.weights import read_through, weights_file
from kvswap_torch import format_bytes, presets

_TEXT = f"""Decodes with each contender in turn, each in a process of its own: one token of every
sequence at a time, so that what else the machine does falls on all alike. Caches are filled with
random K and V, so no prefill is needed. Random choices are the worst case: nothing is selected
twice, nothing can be predicted. Recorded ones (smollm2, reference_model) are those of a model that
reads a manual, with its predictions, scaled to the cell's shape; kvswap still scores all groups.
Each cell is one JSON file under bench/results/side_by_side; a cell that has one is left
alone, so that a plan can be run in parts. Tables and plots: python -m bench table

Contenders: {", ".join(LABELS)}, and {PRESET}NAME: a preset with its own settings and memory.
Those of llama.cpp and ollm need `make peers`.

Example: python -m bench side_by_side --shapes small --contexts 8192 --batches 1
"""
HELP = "\n\n".join(" ".join(part.split()) for part in _TEXT.split("\n\n"))


def main(
    shapes: Annotated[str, typer.Option(help="small, 1b (4 layers), 1b-whole, 8b-layers")] = (
        "small,1b,8b-layers"
    ),
    contexts: Annotated[str, typer.Option(help="tokens")] = ",".join(map(str, CONTEXTS)),
    batches: Annotated[str, typer.Option(help="sequences")] = ",".join(map(str, BATCHES)),
    devices: Annotated[str, typer.Option(help="local; emmc, ufs (modelled)")] = "local,emmc",
    linear: Annotated[
        str, typer.Option(help="the model's linear layers: torch; ours, as commands have them")
    ] = "ours",
    choices: Annotated[str, typer.Option(help="random; recorded: smollm2, reference_model")] = (
        "random"
    ),
    only: Annotated[str, typer.Option(help="contenders, comma-separated")] = ",".join(DEFAULT),
    seconds: Annotated[float, typer.Option(help="of decoding, at most, with each")] = 20,
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("build"),
    again: Annotated[bool, typer.Option(help="measure cells that have a result, too")] = False,
    dry: Annotated[bool, typer.Option(help="only print what would be done")] = False,
    out: Annotated[Path, typer.Option(help="folder for results")] = FOLDER,
) -> None:
    console = Console(width=140)
    keys = _known(only)
    try:
        sizes = (_words(shapes), _numbers(contexts), _numbers(batches))
        plan = cells(*sizes, _words(devices), linear, _words(choices))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    due = [cell for cell in plan if again or not _file(cell, out).exists()]
    _print_plan(console, plan, due, keys, seconds)
    if dry or not due:
        return
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with console.status("measuring memory"):
        memory_bandwidth = memory_bytes_per_second()
    disks: dict[str | None, DiskBandwidth] = {}
    for cell in due:
        if cell.device not in disks:
            with console.status("measuring the disk"):
                disks[cell.device] = measured_disk(path, cell.device)
        bandwidths = (memory_bandwidth, disks[cell.device])
        results = measure_cell(cell, keys, path, seconds, bandwidths, console)
        results["floor_ms_least"] = floor_ms_least(results, _before(cell, out))
        out.mkdir(parents=True, exist_ok=True)
        _file(cell, out).write_text(json.dumps(results, indent=2) + "\n")
        print_cell(console, results)


def measure_cell(
    cell: Cell,
    keys: list[str],
    path: Path,
    seconds: float,
    bandwidths: tuple[float, DiskBandwidth],
    console: Console,
) -> dict[str, Any]:
    began = time.perf_counter()
    with console.status(cell.name) as status:
        weights = weights_file(cell.shape, Path("build/side_by_side"))
        read_through(weights)
        described = machine.describe(path)
        measurement = Measurement(
            cell, path, weights, seconds, lambda what: status.update(f"{cell.name}: {what}")
        )
        measurement.run(keys, room_now(path))
    results = {"machine": described} | measurement.results(*bandwidths)
    return results | {"seconds": round(time.perf_counter() - began, 1)}


def measured_disk(path: Path, device: str | None) -> DiskBandwidth:
    """Its scratch file is gone before there are gigabytes of K and V beside it."""
    disk = DiskBandwidth(path, device)
    try:
        disk.measure_all()
    finally:
        disk.close()
    return disk


def room_now(path: Path) -> Room:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    cap = MemoryCap.open()
    if cap is not None:
        cap.close()
    available = int(fields["MemAvailable"].split()[0]) << 10
    return Room(
        available,
        shutil.disk_usage(path).free,
        has_cap=cap is not None,
        modules=frozenset(name for name, _ in OPTIONAL.values() if importlib.util.find_spec(name)),
    )


def _print_plan(
    console: Console, plan: list[Cell], due: list[Cell], keys: list[str], seconds: float
) -> None:
    table = Table(title="cells")
    for column in ("cell", "KV of a full cache", "estimate", ""):
        table.add_column(column)
    estimates = {cell: estimate_seconds(cell, keys, seconds) for cell in due}
    for cell in plan:
        took = f"{estimates[cell]:.0f} s" if cell in estimates else ""
        has = "" if cell in estimates else "has a result"
        table.add_row(cell.name, format_bytes(cell.kv_bytes), took, has)
    console.print(table)
    console.print(f"about {sum(estimates.values()) / 60:.0f} minutes for {len(due)} cells")


def _file(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.json"


def _before(cell: Cell, folder: Path) -> dict[str, Any] | None:
    path = _file(cell, folder)
    return json.loads(path.read_text()) if path.exists() else None


def _known(only: str) -> list[str]:
    keys = _words(only)
    known = [*LABELS, *(f"{PRESET}{preset.name}" for preset in presets())]
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise typer.BadParameter(f"only: must be among {', '.join(known)}, got {unknown[0]!r}")
    return in_order(keys)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError as error:
        raise typer.BadParameter(f"must be numbers separated by commas, got {text!r}") from error


if __name__ == "__main__":
    main.__doc__ = HELP
    typer.run(main)
