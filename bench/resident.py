"""What it takes to have the reuse pages of a few layers only in memory (DynaKV 6.1).

    python -m bench.resident --out resident

A model reads a prompt and follows the same text token by token in caches whose `resident_layers`
differ, groups and clusters in turn, on the local disk and on modelled devices: memory, what is
read, and time. What a layer kept is read again in each step, while the layers before it compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.clustering import Follower, kinds
from bench.reading import REFERENCE, open_held_out
from kvswap_torch import KVSwapCache, SwapConfig, format_bytes

COLUMNS = ("disk", "cache", "layers with pages", "KV memory", "read a token", "requests", "ms")


def settings(group_tokens: int, layers: list[int | None]) -> Iterator[tuple[str, int | None, Any]]:
    """Name, resident layers and config of each cache."""
    known = dict(kinds(group_tokens))
    for name in ("groups", "clusters, 16 wait"):
        for count in layers:
            yield name, count, dataclasses.replace(known[name], resident_layers=count)


def measured(
    network: Any, ids: torch.Tensor, length: int, path: Path, device: str, made: list[Any]
) -> Iterator[dict[str, Any]]:
    """A row for each cache, their steps in turn."""
    steps = len(ids) - length
    with ExitStack() as stack:
        followers = []
        for name, count, config in made:
            config: SwapConfig = dataclasses.replace(config, device_model=device or None)
            cache = stack.enter_context(
                KVSwapCache(network, path, config, max_context=len(ids), max_batch=1)
            )
            followers.append((count, Follower(name, cache, config.group_tokens)))
            followers[-1][1].read(network, ids[:length])
        for token in track(ids[length:], f"following, {device or 'local disk'}"):
            for _, follower in followers:
                follower.step(network, token)
        own = cache.stats().kv_bytes_full // cache.stats().tokens
        for count, follower in followers:
            told = follower.as_dict(steps, own)
            yield {"device": device or "local disk", "resident_layers": count, **told}


def lines(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each row, what it shares with the one above left out."""
    above: tuple[str, str] = ("", "")
    for row in rows:
        here = (row["device"], row["name"])
        yield [
            "" if here[0] == above[0] else here[0],
            "" if here == above else here[1],
            str(row["resident_layers"] or "all"),
            format_bytes(row["memory_bytes"]),
            format_bytes(row["bytes_read"]),
            f"{row['requests']:.0f}",
            f"{row['ms']:.2f}",
        ]
        above = here


def resident_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """The same as a page has it."""
    yield "| tokens + steps | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for result in sorted(results, key=lambda result: result["tokens"]):
        text = f"{result['tokens']:,} + {result['steps']}"
        for line in lines(result["rows"]):
            yield f"| {text} | " + " | ".join(line) + " |"
            text = ""


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of the prompt")] = 4096,
    steps: Annotated[int, typer.Option(help="tokens that follow, one at a time")] = 300,
    group_tokens: Annotated[int, typer.Option(help="of a group, and of a cluster's page")] = 8,
    layers: Annotated[str, typer.Option(help="with pages in memory at once")] = "2,4,all",
    devices: Annotated[str, typer.Option(help="local, or modelled")] = "local,ufs,emmc",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads)
    described = machine.describe(path)
    network, sample = open_held_out(model, length + steps)
    ids = sample.ids[: length + steps]
    counts = [None if word == "all" else int(word) for word in layers.split(",")]
    made = list(settings(group_tokens, counts))
    rows = [
        row
        for device in devices.split(",")
        for row in measured(network, ids, length, path, device.replace("local", ""), made)
    ]
    table = Table(*COLUMNS, title=f"{length:,} tokens, then {len(ids) - length:,}")
    for line in lines(rows):
        table.add_row(*line)
    console = Console(width=120)
    console.print(table)
    if out:
        facts = {"machine": described, "model": model.resolve().name, "tokens": length}
        facts |= {"steps": len(ids) - length, "threads": threads, "rows": rows}
        console.print(f"wrote {machine.write(out, facts).name}")


if __name__ == "__main__":
    typer.run(main)
