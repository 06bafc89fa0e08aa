"""Records in e4m3 beside the model's dtype: bytes, pages, time of a step and of long chunks.

    python -m bench.float8_records --shape 1b --context 32768 --batch 8 --out float8_1b_32k_b8

Four caches of the same random keys and values attend as many tokens a step, in turn: records in
bf16 and in e4m3, with groups of G and of 2 G; those of 2 G in e4m3 are as large on disk as those
of G in bf16. Then each reads chunks over the whole past, exactly, and forgets them again. Ratios
are of pairs: what else the machine does falls on all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.contenders import SELECTED_TOKENS, Contender, open_kvswap
from bench.shapes import SHAPES, Shape, make_model
from bench.turns import seconds_of
from kvswap_torch import SwapConfig, format_bytes

PAGES_SHARE = 1.5  # pages for each group attended


@dataclass(frozen=True)
class Kind:
    """What a cache's records hold, and how many tokens each."""

    records: str
    group_tokens: int

    @property
    def name(self) -> str:
        word = "e4m3" if self.records == "fp8" else "bf16"
        return f"{word}, groups of {self.group_tokens}"

    def config(self, rank: int, device: str) -> SwapConfig:
        groups = SELECTED_TOKENS // self.group_tokens
        return SwapConfig(
            records=self.records,
            group_tokens=self.group_tokens,
            rank=rank // 2,  # doubled by a cache that has no projection file
            summary_dtype="int8",
            score="mass",
            groups_max=groups,
            pages_max=int(PAGES_SHARE * groups),
            select_queries_max=1,
            look_ahead=True,
            device_model=device or None,
        )


class Rounds:
    """Seconds of steps and of chunks, one number a round for each cache."""

    def __init__(self, contenders: list[Contender], chunk: int, batch: int):
        self.contenders = contenders
        ids = torch.randint(4096, (batch, chunk), generator=torch.Generator().manual_seed(0))
        self._chunk = ids
        self.chunks: dict[str, list[float]] = {each.name: [] for each in contenders}

    def step(self) -> None:
        for contender in self.contenders:
            contender.step()

    def read_chunk(self) -> None:
        for contender in self.contenders:
            seconds = seconds_of(contender.model, contender.cache, self._chunk)
            contender.cache.crop(-self._chunk.shape[1])
            self.chunks[contender.name].append(seconds)

    def ratios(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """To the first, of pairs: quartiles."""
        first = seconds[self.contenders[0].name]
        return {
            name: [
                round(quartile, 3)
                for quartile in statistics.quantiles(
                    (a / b for a, b in zip(times, first, strict=True)), n=4
                )
            ]
            for name, times in seconds.items()
        }


def row(contender: Contender, steps: list[float], chunks: list[float]) -> dict[str, Any]:
    """What one cache took."""
    stats = contender.cache.stats()
    return {
        "name": contender.name,
        "ms_per_step": round(1e3 * statistics.median(steps), 2),
        "seconds_per_chunk": round(statistics.median(chunks), 3),
        "bytes_read_per_token": round(stats.bytes_read_per_token),
        "bytes_written_per_token": round(stats.bytes_written_per_token),
        "pages_bytes": stats.ledger["pages"],
        "kv_memory_bytes": stats.resident_bytes,
    }


def lines(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One a cache: figures, and their share of the first one's."""
    first = results["caches"][0]
    for cache in results["caches"]:
        shares = {name: f"{cache[name] / first[name]:.2f}" for name in cache if name != "name"}
        step, chunk = (results[kind][cache["name"]] for kind in ("step_ratio", "chunk_ratio"))
        yield (
            cache["name"],
            f"{cache['ms_per_step']:.1f}",
            f"{step[1]:.2f} ({step[0]:.2f} to {step[2]:.2f})",
            f"{cache['seconds_per_chunk']:.2f}",
            f"{chunk[1]:.2f} ({chunk[0]:.2f} to {chunk[2]:.2f})",
            f"{format_bytes(cache['bytes_read_per_token'])}, {shares['bytes_read_per_token']}",
            f"{format_bytes(cache['bytes_written_per_token'])}, "
            f"{shares['bytes_written_per_token']}",
            f"{format_bytes(cache['pages_bytes'])}, {shares['pages_bytes']}",
        )


COLUMNS = ("records", "ms a step", "of the first", "s a chunk", "of the first")
COLUMNS += ("read per token", "written per token", "pages")


def main(
    shape_name: Annotated[str, typer.Option("--shape", help="1b, small or 8b-layers")] = "1b",
    layers: Annotated[int, typer.Option(help="cut the model to so many layers; 0: all")] = 4,
    context: Annotated[int, typer.Option(help="tokens in the cache")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences")] = 8,
    group_tokens: Annotated[int, typer.Option(help="G of records in bf16")] = 4,
    rank: Annotated[int, typer.Option(help="columns of the projection")] = 32,
    steps: Annotated[int, typer.Option(help="tokens to decode with each cache")] = 24,
    chunk: Annotated[int, typer.Option(help="tokens of a long chunk")] = 256,
    chunks: Annotated[int, typer.Option(help="chunks to read with each cache")] = 5,
    warm_up: Annotated[int, typer.Option(help="first steps that do not count")] = 4,
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("build"),
    device: Annotated[str, typer.Option(help="modelled device: nvme, ufs, emmc")] = "",
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console()
    described = machine.describe(path)
    shape: Shape = SHAPES[shape_name]
    if layers:
        shape = replace(shape, layers=layers)
    model = make_model(shape, context + chunk)
    sizes = (group_tokens, 2 * group_tokens)
    kinds = [Kind(records, size) for size in sizes for records in ("model", "fp8")]
    contenders = []
    for kind in kinds:
        with console.status(f"filling {kind.name}"):
            config = kind.config(rank, device)
            contenders.append(open_kvswap(model, shape, batch, context, path, config))
            contenders[-1].name = kind.name
    rounds = Rounds(contenders, chunk, batch)
    with console.status("decoding"):
        for _ in range(steps):
            rounds.step()
    stepped = {each.name: each.seconds[warm_up:] for each in contenders}
    with console.status("reading chunks"):
        for _ in range(chunks + 1):
            rounds.read_chunk()
    read = {name: seconds[1:] for name, seconds in rounds.chunks.items()}
    results = {
        "machine": described,
        "shape": shape_name,
        "layers": shape.layers,
        "context": context,
        "batch": batch,
        "chunk": chunk,
        "device": device or "local disk",
        "step_ratio": rounds.ratios(stepped),
        "chunk_ratio": rounds.ratios(read),
        "caches": [row(each, stepped[each.name], read[each.name]) for each in contenders],
    }
    table = Table(*COLUMNS, title=f"{shape_name}, {context:,} tokens, batch {batch}")
    for line in lines(results):
        table.add_row(*line)
    console.print(table)
    if out:
        console.print(f"wrote {machine.write(out, results).name}")
    for contender in contenders:
        contender.close()


if __name__ == "__main__":
    typer.run(main)
