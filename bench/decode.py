"""Decoding speed of one setting, in one process: KV on disk against KV in memory.

    python -m bench decode --shape 1b --context 32768 --batch 8

Fills caches of one shape with random keys and values (no prefill is needed), then decodes with a
randomly initialised model, one token of each in turn, so that what else the machine does falls on
all alike; medians are reported. Random weights have no locality: two steps choose almost nothing in
common. `--memory 1/13` gives the reuse buffer all that such a share of the full cache leaves.
"""

from __future__ import annotations

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
from kvswap_torch import SwapConfig
from kvswap_torch.config import Memory, Prefetch, Selection, Storage, Summary
from kvswap_torch.config.engine import renamed

NAMES = "kvswap,static,dynamic,restore,floor"


@dataclass(frozen=True)
class Setting:
    """What is measured; `memory` is a share of the full cache, and pages are as many as fit."""

    shape_name: str
    layers: int
    context: int
    batch: int
    group_tokens: int = 4
    rank: int = 32
    rows: str = "model"
    score: str = "sum"
    memory: str = ""
    device: str = ""

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.shape_name]
        return replace(shape, layers=self.layers) if self.layers else shape

    @property
    def budget_bytes(self) -> int | None:
        whole = self.shape.kv_bytes(self.batch, self.context)
        return int(Fraction(self.memory) * whole) if self.memory else None

    @property
    def config(self) -> SwapConfig:
        groups = SELECTED_TOKENS // self.group_tokens
        pages = self.context // self.group_tokens if self.memory else 3 * groups // 2
        return SwapConfig(
            summary=Summary(
                rank=self.rank // 2,  # doubled by a cache that has no projection file
                dtype=renamed("summary_dtype", self.rows)[1],
            ),
            selection=Selection(
                group_tokens=self.group_tokens,
                score=renamed("score", self.score)[1],
                top_k_groups=groups,
                max_step_tokens=1,
            ),
            prefetch=Prefetch(mode="trust"),
            memory=Memory(pages_per_layer=max(pages, groups)),
            storage=Storage(simulated_device=self.device or None),
        )

    def opened(self, name: str, model: Any, path: Path) -> Contender:
        """One of `NAMES`, filled."""
        size = self.shape, self.batch, self.context
        if name == "kvswap":
            return open_kvswap(model, *size, path, self.config, self.budget_bytes)
        if name == "restore":
            file = KvFile(path, self.shape.layers, kv_file_size(*size), torch.bfloat16)
            fill_file(file, self.shape, self.batch)
            return open_restore(model, *size, file, self.device or None)
        if name == "floor":
            return open_floor(model, self.shape, self.batch)
        return {"static": open_static, "dynamic": open_dynamic}[name](model, *size)


def told(contender: Contender, warm_up: int, first: list[float]) -> dict[str, Any]:
    """Median, quartiles and the median ratio of pairs to the first contender, in ms."""
    seconds = contender.seconds[warm_up:]
    low, middle, high = statistics.quantiles(seconds, n=4)
    ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
    times = {"ms": round(1e3 * middle, 2), "ratio": round(ratio, 3)}
    return times | {"quartiles": [round(1e3 * low, 2), round(1e3 * high, 2)]}


def main(
    shape: Annotated[str, typer.Option(help="1b, small or 8b-layers")] = "1b",
    layers: Annotated[int, typer.Option(help="cut the model to so many layers; 0: all")] = 4,
    context: Annotated[int, typer.Option(help="tokens in the cache")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences")] = 8,
    steps: Annotated[int, typer.Option(help="tokens to decode with each cache")] = 24,
    warm_up: Annotated[int, typer.Option(help="first steps that do not count")] = 4,
    group_tokens: Annotated[int, typer.Option(help="G")] = 4,
    rank: Annotated[int, typer.Option(help="columns of the projection")] = 32,
    rows: Annotated[str, typer.Option(help="of the summary: model, int8 or int4")] = "model",
    score: Annotated[str, typer.Option(help="sum, mass or max_mass")] = "sum",
    memory: Annotated[str, typer.Option(help="share of the full cache, such as 1/13")] = "",
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("."),
    device: Annotated[str, typer.Option(help="modelled device: nvme, ufs, emmc")] = "",
    only: Annotated[str, typer.Option(help="contenders, comma-separated")] = NAMES,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console()
    names = only.split(",")
    if unknown := set(names) - set(NAMES.split(",")):
        raise typer.BadParameter(f"only: must be among {NAMES}, got {', '.join(sorted(unknown))}")
    setting = Setting(
        shape, layers, context, batch, group_tokens, rank, rows, score, memory, device
    )
    model = make_model(setting.shape, context)
    contenders = {name: setting.opened(name, model, path) for name in names}
    ours = contenders.get("kvswap")
    clock = TokenClock(ours.cache) if ours is not None else None
    for _ in range(steps):
        for contender in contenders.values():
            contender.step()
    first = contenders[names[0]].seconds[warm_up:]
    results: dict[str, Any] = {"machine": machine.describe(path), "setting": vars(setting)}
    results["contenders"] = {name: told(c, warm_up, first) for name, c in contenders.items()}
    if ours is not None:
        stats = ours.cache.stats()
        results["kvswap"] = {
            "memory_share": round(stats.resident_bytes / stats.kv_bytes_full, 4),
            "bytes_read_per_token": round(stats.bytes_read_per_token),
            "hit_rate": stats.hit_rate,
            "time_of_a_token_ms": clock.milliseconds(ours.seconds),
        }
    table = Table("cache", "ms per step", "quartiles", f"of {names[0]}'s time")
    for name, row in results["contenders"].items():
        low, high = row["quartiles"]
        table.add_row(name, f"{row['ms']:.1f}", f"{low:.1f} - {high:.1f}", f"{row['ratio']:.2f}")
    console.print(table, results.get("kvswap", ""))
    if out:
        console.print(f"wrote {machine.write(out, results).name}")
    for contender in contenders.values():
        contender.close()


if __name__ == "__main__":
    typer.run(main)
