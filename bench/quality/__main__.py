"""Right answers of caches on disk beside the full cache's, at equal bytes."""

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
from bench.quality.cost import cost_of, first_cells
from bench.quality.harness import REFERENCE, Harness, Setting
from bench.quality.plan import make_plan
from bench.quality.report import print_summary, summarise, write
from bench.quality.tasks import LANGUAGE, TASKS
from bench.quality.text import HELD_OUT
from kvswap_torch.errors import KVSwapError
from kvswap_torch.half_linear import TOLD

_TEXT = """Which settings find what the full cache finds, at an equal number of bytes?

A document is read once with the full cache; then every question about it is answered,
teacher-forced, by the full cache and by a cache on disk for each method. Results are appended to a
journal in build/quality, one line for each document and method. What is left is said before it
begins, with the time that it takes: by the journal, or by a first document. --dry-run says what the
journal tells, and ends. The same command resumes where it stopped, and several commands may fill
one journal; a change of the weights or of what is asked begins a new one. At the end a summary of
all that the journal has is written to bench/results/quality, and `python -m bench table` puts it
into docs/benchmarks.

Methods are written FAMILY:SETTING=VALUE,SETTING=VALUE and separated by spaces. The family product
is the cache by its defaults; every preset is a family of its own. Settings: memory (share of the
full cache given as kv_memory_bytes), config (a file), preset, question (after: read as one chunk;
inside: token by token, under selection) and every field of SwapConfig.

Sets: defaults (an eighth and a thirteenth of the memory), presets (each at three shares).

Examples:

  python -m bench quality --lengths 16384,32768 --documents 3

  python -m bench quality --methods presets --lengths 16384 --documents 2 --out presets

  python -m bench quality --model DIR --text book.txt --methods "product:memory=1/8,score=sum"
"""
# A paragraph a line: the terminal's width decides where it is broken.
HELP = "\n\n".join(" ".join(part.split()) for part in _TEXT.split("\n\n"))
NO_RESULTS = "none"
ASKED = ",".join((*TASKS, LANGUAGE))


def main(
    model: Annotated[Path, typer.Option(help="folder of a Hugging Face model")] = REFERENCE,
    lengths: Annotated[str, typer.Option(help="tokens of documents")] = "2048,8192,16384,32768",
    documents: Annotated[str, typer.Option(help="of each length, or one for all")] = "3,4,3,3",
    methods: Annotated[str, typer.Option(help="names and sets")] = "defaults",
    tasks: Annotated[str, typer.Option(help=f"of {ASKED}")] = ASKED,
    text: Annotated[str, typer.Option(help=f"{HELD_OUT}, or a text file")] = HELD_OUT,
    wording: Annotated[str, typer.Option(help="auto, reference, plain or chat")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; empty: the model's")] = "",
    threads: Annotated[int, typer.Option(help="of torch; 0: one for each core")] = 0,
    seed: Annotated[int, typer.Option(help="of documents, facts and questions")] = 0,
    folder: Annotated[Path, typer.Option(help="for journals")] = Path("build/quality"),
    out: Annotated[str, typer.Option(help="name, or absolute path; none: write nothing")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say the cost, and end")] = False,
) -> None:
    console = Console(width=140)
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    try:
        precision = _dtype(dtype)
        setting = Setting(model, _words(tasks), text, seed, wording, precision)
        harness = Harness(setting, folder)
        numbers = (_numbers("lengths", lengths), _numbers("documents", documents))
        plan = make_plan(*numbers, methods.split())
        console.print(f"journal: {harness.journal.path}")
        cost = cost_of(plan, harness.journal)
        console.print(cost.line(), highlight=False, soft_wrap=True)
        if dry_run:
            return
        if cost.seconds is None:
            harness.run(first_cells(plan))
            rest = cost_of(plan, harness.journal).line()
            console.print(rest, highlight=False, soft_wrap=True)
        _run(harness, plan, console)
        summary = summarise(harness)
    except (OSError, ValueError, KVSwapError) as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    print_summary(summary, console)
    if out != NO_RESULTS:
        facts = machine.describe(Path("."))
        facts["command"] = shlex.join(["python", "-m", "bench", "quality", *sys.argv[1:]])
        if harness.has_wide_products:
            facts["products"] = TOLD
        path = write(out or summary["model"], {"machine": facts} | summary)
        console.print(f"wrote {path}", soft_wrap=True)


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
