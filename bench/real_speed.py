"""Milliseconds per token of several settings side by side, on a model that reads a document."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from bench import machine
from bench.reading import CHUNK, open_held_out, read, step
from bench.real_rows import DEVICES, PREFETCH, WARM, Work, rounds, told
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.compare.journal import Journal, digest_of
from kvswap_torch.hf.families import model_parts
from kvswap_torch.native import LIBRARY
from kvswap_torch.tuning.documents import TURNS_MAX

_TEXT = """Milliseconds per token of several settings side by side, on a model that read a document.

Every cache reads the same document. Then each decodes a token of its questions in turn, so that
what else the machine does strikes all alike. Methods are written as for `python -m bench quality`.
transformers' DynamicCache (row full) and StaticCache (row static) are in memory, without compile.
With --prefetch and --devices each method is a row for each mode and device; own is its own mode.
These two change how a method reads and nothing of what it selects.

Each row has its median and quartiles in ms, its median ratio to the first row of its device
(where both were decoded in one round), the
milliseconds that layers waited for the disk (wait_ms) and the share of read time that was hidden
(hidden_share). Steps before the 9th do not count.

What it costs is said before it begins: each row reads the document once. With SmolLM2-135M and
4,096 tokens, a row takes about half a minute on two idle cores, and more on a modelled device. All
caches of a device are open at once, the full ones included. Rows are in a journal when their
device is done: the same command measures only what is missing, --again all. Another model, text or
library begins a new journal.

Examples:

  python -m bench real_speed --model build/models/smollm2 --tokens 4096

  python -m bench real_speed --model build/models/smollm2 --tokens 4096 --prefetch own,off
  --devices local,ufs,emmc --out real_speed

  python -m bench real_speed --model DIR --methods "product:memory=1/8
  product:config=tuned.json,memory=1/8"
"""
HELP = "\n\n".join(" ".join(part.split()) for part in _TEXT.split("\n\n"))
METHODS = "product:memory=1/8 product:memory=1/13"


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")],
    methods: Annotated[str, typer.Option(help="product:..., with spaces between")] = METHODS,
    tokens: Annotated[int, typer.Option("--tokens", "--length", help="of the document")] = 4096,
    steps: Annotated[int, typer.Option(min=2, help="tokens decoded in each cache")] = 128,
    prefetch: Annotated[str, typer.Option(help=f"of {', '.join(PREFETCH)}")] = "own",
    devices: Annotated[str, typer.Option(help=f"of {', '.join(DEVICES)}")] = "local",
    threads: Annotated[int, typer.Option(min=1, help="of torch")] = 1,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    folder: Annotated[Path, typer.Option(help="for journals")] = Path("build/real_speed"),
    again: Annotated[bool, typer.Option("--again", help="measure all rows anew")] = False,
    out: Annotated[
        str, typer.Option(help="name under bench/results, or absolute path; empty: write nothing")
    ] = "",
) -> None:
    console = Console()
    try:
        names = rounds(methods.split(), prefetch.split(","), devices.split(","))
    except ValueError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    torch.set_num_threads(threads)
    described = machine.describe(path)
    network, ids, first = text_of(model, tokens, steps)
    size = Bytes(model_parts(network), len(ids), path, first)
    work = Work(network, ids, first, size, path)
    journal = open_journal(model, folder, ids, first, threads, again)
    console.print(f"journal: {journal.path}", soft_wrap=True)
    for line in cost_lines(work, names, journal):
        console.print(line, highlight=False, soft_wrap=True)
    for of_device in names:
        work.run(of_device, journal)
    rows = dict(told(names, journal))
    console.print(table(rows), soft_wrap=True)
    if out:
        facts = {"machine": described, "model": model.resolve().name, "tokens": len(ids)}
        written = machine.write(out, facts | {"threads": threads, "methods": rows})
        console.print(f"wrote {written}", soft_wrap=True)


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Of each row what a reader compares; the results have the rest."""
    made = Table(box=None, pad_edge=False)
    for head in ("row", "ms", "to the first", "waiting, ms", "hidden", "memory"):
        made.add_column(head, justify="left" if head == "row" else "right", no_wrap=True)
    for name, row in rows.items():
        if "impossible" in row:
            made.add_row(name, row["impossible"])
            continue
        keys = {"wait_ms": ".2f", "hidden_share": ".2f", "memory_share": ".3f"}
        found = [
            "" if row.get(key) is None else format(row[key], form) for key, form in keys.items()
        ]
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        made.add_row(name, f"{row['ms']:.1f}", ratio, *found)
    return made


def text_of(model: Path, tokens: int, steps: int) -> tuple[Any, torch.Tensor, int]:
    """The model; a document's tokens with those that are decoded; how many are read before."""
    network, sample = open_held_out(model, tokens + min(tokens // 3, TURNS_MAX))
    asked = sample.ids[sample.focus :]
    asked = asked.repeat(-(-(steps + WARM) // len(asked)))[: steps + WARM]
    return network, torch.cat([sample.ids[: sample.focus], asked]), sample.focus


def open_journal(
    model: Path, folder: Path, ids: torch.Tensor, first: int, threads: int, again: bool
) -> Journal:
    """Of this model, text and library; `again`: without the lines of before."""
    files = [*model.glob("*.safetensors"), *model.glob("config.json"), LIBRARY]
    asked = {"ids": ids.tolist(), "first": first, "threads": threads}
    path = folder / f"{model.resolve().name}-{digest_of(files, asked)}.jsonl"
    if again:
        path.unlink(missing_ok=True)
    return Journal(path, ("name",))


def cost_lines(work: Work, names: list[list[str]], journal: Journal) -> list[str]:
    """What is to come; some tokens are read to time them."""
    rows = sum(map(len, names))
    left = sum(len(work.missing(of_device, journal)) for of_device in names)
    if not left:
        return [f"all {rows} rows are in the journal"]
    decoded = len(work.ids) - work.first
    a_token, a_step = _timed(work)
    minutes = left * (work.first * a_token + decoded * a_step) / 60
    return [
        f"{rows} rows, {rows - left} in the journal; each of the others reads {work.first:,} tokens"
        f" and decodes {decoded}: at least {minutes:.1f} minutes together, and more for waiting"
    ]


def _timed(work: Work) -> tuple[float, float]:
    """Seconds of a token that is read among many, and of a step, in a short full cache."""
    cache, ids = DynamicCache(config=work.model.config), work.ids[: min(CHUNK, work.first) // 2]
    read(work.model, DynamicCache(config=work.model.config), ids[:64])  # warms up
    began = time.perf_counter()
    read(work.model, cache, ids)
    a_token = (time.perf_counter() - began) / len(ids)
    return a_token, min(step(work.model, cache, ids[-1])[0] for _ in range(3))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(help=HELP)(main)
    app()
