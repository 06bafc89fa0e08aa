"""Which method finds what the full cache finds, at an equal number of bytes?"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench import machine
from bench.quality.harness import REFERENCE, Harness, Setting
from bench.quality.methods import FAMILIES, OF_CLUSTERS, SETTINGS
from bench.quality.plan import make_plan
from bench.quality.report import RESULTS, print_summary, summarise, write
from bench.quality.tasks import LANGUAGE, OF_TEXT, TASKS
from bench.quality.text import CODE, HELD_OUT
from kvswap_torch.errors import KVSwapError
from kvswap_torch.half_linear import TOLD

_TEXT = f"""Which method finds what the full cache finds, at an equal number of bytes?

A document is read once with the full cache; then every question about it is answered under each
method, teacher-forced, in plain torch. Results are appended to a journal in build/quality, one line
for each document and method, so that the same command goes on where it stopped, and several
commands may fill one journal; a change of the weights, the config or what is asked begins a new
one. At the end the summary and the figures of all that the journal has are written to
bench/results/quality, and `python -m bench.table` puts them into docs/results.md.

Methods are written FAMILY:SETTING=VALUE,SETTING=VALUE and separated by spaces. Families:
{", ".join(FAMILIES)}, and paper (KVSwap as published). What is not said is as the model's
kvswap.json has it. Settings of kvswap:

{chr(10).join(f"{name}: {text}" + chr(10) for name, text in SETTINGS.items())}

Settings of clusters (DynaKV; emulated: the engine's own are product:preset=dynakv):

{chr(10).join(f"{name}: {text}" + chr(10) for name, text in OF_CLUSTERS.items())}

Sets: core (what is compared), grid (one setting varied at a time), layers (one layer at a time on
the full cache: shows which layer a gap comes from), presets (each at three shares of the memory).

Examples:

  python -m bench.quality --lengths 16384,32768 --documents 3 --methods core

  python -m bench.quality --lengths 4096 --documents 4 --methods "kvswap recent:memory=1/13"

  python -m bench.quality --methods presets --lengths 16384 --documents 2 --out presets

  python -m bench.quality --model DIR --text book.txt --lengths 8192 --documents 4
"""
# A paragraph a line: the terminal's width decides where it is broken.
HELP = "\n\n".join(" ".join(part.split()) for part in _TEXT.split("\n\n"))
NO_RESULTS = "none"
ASKED = ",".join((*TASKS, LANGUAGE))


def main(
    model: Annotated[Path, typer.Option(help="folder of a Hugging Face model")] = REFERENCE,
    lengths: Annotated[str, typer.Option(help="tokens of documents")] = "2048,8192,16384,32768",
    documents: Annotated[str, typer.Option(help="of each length, or one for all")] = "3,4,3,3",
    methods: Annotated[str, typer.Option(help="names and sets")] = "core grid layers",
    grid_to: Annotated[int, typer.Option(help="longest for the sets grid and layers")] = 8192,
    tasks: Annotated[str, typer.Option(help=f"of {', '.join((*TASKS, *OF_TEXT))}")] = ",".join(
        (*TASKS, LANGUAGE)
    ),
    text: Annotated[str, typer.Option(help=f"{HELD_OUT}, {CODE}, or a text file")] = HELD_OUT,
    wording: Annotated[str, typer.Option(help="auto, reference, plain or chat")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; empty: the model's")] = "",
    threads: Annotated[int, typer.Option(help="of torch; 0: one for each core")] = 0,
    seed: Annotated[int, typer.Option(help="of documents, facts and questions")] = 0,
    folder: Annotated[Path, typer.Option(help="for journals")] = Path("build/quality"),
    out: Annotated[str, typer.Option(help="name of the results; none: write none")] = "",
) -> None:
    console = Console(width=140)
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    try:
        precision = _dtype(dtype)
        setting = Setting(model, _words(tasks), text, seed, wording, precision)
        harness = Harness(setting, folder)
        numbers = (_numbers("lengths", lengths), _numbers("documents", documents))
        plan = make_plan(*numbers, methods.split(), grid_to, harness.parts.shape.layers)
        console.print(f"journal: {harness.journal.path}")
        _run(harness, plan, console)
        summary = summarise(harness)
    except (OSError, ValueError, KVSwapError) as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    print_summary(summary, console)
    if out != NO_RESULTS:
        facts = machine.describe(Path("."))
        facts["command"] = shlex.join(["python", "-m", "bench.quality", *sys.argv[1:]])
        if harness.has_wide_products:
            facts["products"] = TOLD
        path = write(out or summary["model"], {"machine": facts} | summary)
        console.print(f"wrote {path.relative_to(RESULTS.parent)} and its figures")


def _run(harness: Harness, plan: list, console: Console) -> None:
    columns = (
        TextColumn("{task.description}", table_column=None),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    total = harness.missing(plan)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        harness.run(
            plan,
            lambda what: bar.update(
                task, description=what, completed=total - harness.missing(plan)
            ),
        )
        bar.update(task, description="done", completed=total)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split())


def _numbers(name: str, text: str) -> list[int]:
    words = _words(text)
    if not all(word.isdigit() for word in words):
        raise ValueError(f"{name}: must be whole numbers with commas between, got {text!r}")
    return [int(word) for word in words]


def _dtype(name: str) -> torch.dtype | None:
    known = {"": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"dtype: must be float32 or bfloat16, got {name!r}")
    return known[name]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(help=HELP)(main)
    app()
