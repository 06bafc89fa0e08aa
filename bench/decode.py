"""Decoding speed: KV on disk against KV in memory and against reading everything back.

    python -m bench.decode --shape 1b --layers 4 --context 32768 --batch 8

Fills caches of one shape with random keys and values (no prefill is needed), then decodes with a
randomly initialised model, one token of each in turn, so that what else the machine does falls on
all alike; medians are reported. Random weights have no locality: two steps choose almost nothing
in common. `--trace` replays the choices of a model that reads (see record_trace.py) instead.
`--memory 1/13` gives the reuse buffer all that such a share of the full cache leaves. A time *with
a free disk* is the measured one without waiting for reads: no disk makes it less.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.contenders import (
    SELECTED_TOKENS,
    Contender,
    TokenClock,
    fill_file,
    kv_file_size,
    open_dynamic,
    open_floor,
    open_kvswap,
    open_restore,
    open_static,
)
from bench.kv_file import KvFile
from bench.shapes import SHAPES, Shape, make_model
from kvswap_torch import SwapConfig, format_bytes


def replay(contender: Contender, trace: dict[str, Any], shape: Shape, batch: int) -> None:
    """Overrides each step's choices by recorded ones; layers and steps go round."""
    steps = trace["steps"]

    def override(step: int) -> None:
        session = contender.cache.driver.session
        for layer in range(shape.layers):
            chosen = []
            for sequence in range(batch):
                recorded = steps[(step + 17 * sequence) % len(steps)]
                chosen.append(recorded[layer % len(recorded)])
            session.override_selection(layer, chosen)

    contender.before_step = override


def read_trace(path: Path, group_tokens: int) -> dict[str, Any]:
    """Recorded choices, which name groups of the same size as the cache's."""
    trace = json.loads(path.read_text())
    recorded = trace["group_tokens"]
    if recorded != group_tokens:
        raise typer.BadParameter(
            f"{path.name} has choices of groups of {recorded} tokens, --group-tokens is "
            f"{group_tokens}: give {recorded}, or record another with bench.record_trace",
            param_hint="--trace",
        )
    return trace


def main(
    shape_name: Annotated[str, typer.Option("--shape", help="1b, small or 8b-layers")] = "1b",
    layers: Annotated[int, typer.Option(help="cut the model to so many layers; 0: all")] = 4,
    context: Annotated[int, typer.Option(help="tokens in the cache")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences")] = 8,
    steps: Annotated[int, typer.Option(help="tokens to decode with each cache")] = 24,
    warm_up: Annotated[int, typer.Option(help="first steps that do not count")] = 4,
    group_tokens: Annotated[int, typer.Option(help="G")] = 4,
    rank: Annotated[int, typer.Option(help="columns of the projection")] = 32,
    rows: Annotated[str, typer.Option(help="of the summary: model or int8")] = "model",
    score: Annotated[str, typer.Option(help="sum, mass or max_mass")] = "sum",
    pages: Annotated[int, typer.Option(help="reuse buffer, groups per layer and sequence")] = 150,
    memory: Annotated[str, typer.Option(help="share of the full cache, such as 1/13")] = "",
    replacement: Annotated[str, typer.Option(help="who leaves a page: fifo or lru")] = "fifo",
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("."),
    device: Annotated[str, typer.Option(help="modelled device: nvme, ufs, emmc")] = "",
    trace: Annotated[Path | None, typer.Option(help="replay recorded choices")] = None,
    only: Annotated[str, typer.Option(help="contenders, comma-separated")] = (
        "kvswap,static,dynamic,restore,floor"
    ),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    setting = Setting(shape_name, layers, context, batch, group_tokens, rank, pages, device or None)
    setting = replace(
        setting, rows=rows, score=score, memory=memory or None, replacement=replacement
    )
    recorded = read_trace(trace, group_tokens) if trace is not None else None
    console = Console()
    contenders = open_contenders(setting, only.split(","), path, console)
    ours = contenders[0] if only.startswith("kvswap") else None
    clock = TokenClock(ours.cache) if ours is not None else None
    if ours is not None and recorded is not None:
        replay(ours, recorded, setting.shape, batch)
    with console.status("decoding"):
        for _ in range(steps):
            for contender in contenders:
                contender.step()
    results = {
        "machine": machine.describe(path),
        "shape": shape_name,
        "layers": setting.shape.layers,
        "context": context,
        "batch": batch,
        "device": device or "local disk",
        "choices": "random" if trace is None else trace.name,
    } | summarise(contenders, warm_up)
    if clock is not None:
        times = clock.milliseconds(ours.seconds)
        free = results["ms_per_token"]["kvswap"] - times["wait"]
        results["kvswap"] = account(ours, setting) | {"time_of_a_token_ms": times}
        results["kvswap"] |= {"ms_with_a_free_disk": round(free, 2)}
    _print(console, results)
    if out:
        console.print(f"wrote {machine.write(out, results).name}")
    for contender in contenders:
        contender.close()


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    shape_name: str
    layers: int
    context: int
    batch: int
    group_tokens: int
    rank: int
    pages: int
    device: str | None
    rows: str = "model"
    score: str = "sum"
    memory: str | None = None
    replacement: str = "fifo"

    @property
    def budget_bytes(self) -> int | None:
        """The share of the full cache; pages are then as many as fit."""
        if self.memory is None:
            return None
        return int(Fraction(self.memory) * self.shape.kv_bytes(self.batch, self.context))

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.shape_name]
        return replace(shape, layers=self.layers) if self.layers else shape

    @property
    def config(self) -> SwapConfig:
        groups = SELECTED_TOKENS // self.group_tokens
        pages = self.pages if self.memory is None else self.context // self.group_tokens
        return SwapConfig(
            group_tokens=self.group_tokens,
            rank=self.rank // 2,  # doubled by a cache that has no projection file
            summary_dtype=self.rows,
            score=self.score,
            groups_max=groups,
            pages_max=max(pages, groups),
            replacement=self.replacement,
            select_queries_max=1,
            look_ahead=True,
            device_model=self.device,
        )


def open_contenders(
    setting: Setting, names: list[str], path: Path, console: Console
) -> list[Contender]:
    shape, batch, context = setting.shape, setting.batch, setting.context
    model = make_model(shape, context)
    openers = {
        "kvswap": lambda: open_kvswap(
            model, shape, batch, context, path, setting.config, setting.budget_bytes
        ),
        "static": lambda: open_static(model, shape, batch, context),
        "dynamic": lambda: open_dynamic(model, shape, batch, context),
        "restore": lambda: open_filled_restore(model, setting, path),
        "floor": lambda: open_floor(model, shape, batch),
    }
    contenders = []
    for name in names:
        with console.status(f"filling {name}"):
            contenders.append(openers[name]())
    return contenders


def open_filled_restore(model: Any, setting: Setting, path: Path) -> Contender:
    shape, batch, context = setting.shape, setting.batch, setting.context
    file = KvFile(path, shape.layers, kv_file_size(shape, batch, context), torch.bfloat16)
    fill_file(file, shape, batch)
    return open_restore(model, shape, batch, context, file, setting.device)


def summarise(contenders: list[Contender], warm_up: int) -> dict[str, Any]:
    """Medians, quartiles, and everybody's time over the first one's."""
    first = contenders[0].median(warm_up)
    return {
        "ms_per_token": {c.name: round(1e3 * c.median(warm_up), 2) for c in contenders},
        "ms_quartiles": {c.name: _quartiles(c, warm_up) for c in contenders},
        "speed_against": {c.name: round(c.median(warm_up) / first, 2) for c in contenders[1:]},
    }


def account(ours: Contender, setting: Setting) -> dict[str, Any]:
    """What our cache says of itself."""
    stats, config = ours.cache.stats(), ours.cache.driver.config
    return {
        "config": {
            "G": config.group_tokens,
            "rank": setting.rank,
            "rows": config.summary_dtype,
            "score": config.score,
            "pages_max": config.pages_max,
            "replacement": config.replacement,
        },
        "kv_bytes_full": stats.kv_bytes_full,
        "kv_memory_bytes": stats.resident_bytes,
        "memory_share": round(stats.resident_bytes / stats.kv_bytes_full, 4),
        "bytes_read_per_token": round(stats.bytes_read_per_token),
        "hit_rate": stats.hit_rate,
        "reader": f"{stats.reader}, {stats.io_mode}",
    }


def _quartiles(contender: Contender, warm_up: int) -> list[float]:
    low, _, high = statistics.quantiles(contender.seconds[warm_up:], n=4)
    return [round(1e3 * low, 2), round(1e3 * high, 2)]


def _print(console: Console, results: dict[str, Any]) -> None:
    table = Table(
        title=f"{results['shape']}, {results['layers']} layers, context {results['context']:,}, "
        f"batch {results['batch']}, {results['device']}, choices {results['choices']}"
    )
    for column in ("cache", "ms per token", "quartiles", "time against kvswap"):
        table.add_column(column)
    for name, value in results["ms_per_token"].items():
        ratio = results["speed_against"].get(name)
        table.add_row(
            name,
            f"{value:.1f}",
            "{:.1f} - {:.1f}".format(*results["ms_quartiles"][name]),
            "" if ratio is None else f"{ratio:.2f} x",
        )
    console.print(table)
    ours = results.get("kvswap")
    if ours:
        console.print(
            f"KV memory {format_bytes(ours['kv_memory_bytes'])} of "
            f"{format_bytes(ours['kv_bytes_full'])} ({ours['memory_share']:.1%}), "
            f"{format_bytes(ours['bytes_read_per_token'])} read per token, "
            f"hit rate {ours['hit_rate']:.1%}, {ours['reader']}; "
            f"with a free disk {ours['ms_with_a_free_disk']:.1f} ms"
        )
        console.print("a token's ms: " + json.dumps(ours["time_of_a_token_ms"]))


if __name__ == "__main__":
    typer.run(main)
