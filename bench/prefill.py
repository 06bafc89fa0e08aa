"""Prefill in chunks: what memory that is tight costs while a document is read.

    python -m bench prefill --tokens 8192 --chunks 512,4096 --budgets 1/13,none --out prefill

Each round reads the document once with each cache, in turn: `DynamicCache`, `StaticCache`, and
kvswap with each budget (a share of the KV cache, or none). Printed are medians of the rounds that
count, the ratio of pairs to `DynamicCache`, the same of processor time, which other work on the
machine changes little, and what kvswap waited for: its writes, its reads.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache, StaticCache

from bench import machine
from bench.shapes import SHAPES, make_model
from kvswap_torch import KVSwapCache
from kvswap_torch.cli.load import load_model
from kvswap_torch.half_linear import replace_linear
from kvswap_torch.hf.families import model_parts

REFERENCE = "reference"
NEW_TOKENS = 8  # room beside the document, as a question would need


def open_model(name: str, tokens: int, layers: int, dtype: str) -> Any:
    """layers: of a shape, if not 0."""
    if name in SHAPES:
        shape = SHAPES[name]
        model = make_model(replace(shape, layers=layers or shape.layers), tokens)
        model = model.to(getattr(torch, dtype))
        replace_linear(model)
        return model
    return load_model("examples/reference_model" if name == REFERENCE else name, dtype)


@torch.inference_mode()
def read(model: Any, cache: Any, ids: torch.Tensor, chunk: int) -> tuple[float, float]:
    """Seconds, and those of the process on all cores, to run `ids` through the model by chunks."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for first in range(0, ids.shape[1], chunk):
        part = ids[:, first : first + chunk]
        model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - began, time.process_time() - cpu_began


class Rounds:
    """One document, one length of chunk: seconds of each cache, a number a round."""

    def __init__(self, model: Any, ids: torch.Tensor, chunk: int, budgets: list[str], path: Path):
        self.model, self.ids, self.chunk, self.path = model, ids, chunk, path
        self.shape = model_parts(model).shape
        self.budgets = budgets
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu_seconds: dict[str, list[float]] = defaultdict(list)
        self.waits: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def take(self) -> None:
        config = self.model.config
        room = self.ids.shape[1] + NEW_TOKENS
        self._take("DynamicCache", DynamicCache(config=config))
        self._take("StaticCache", StaticCache(config=config, max_cache_len=room))
        for budget in self.budgets:
            share = None if budget == "none" else Fraction(budget)
            memory = None if share is None else int(share * self.shape.kv_bytes(room))
            with KVSwapCache(
                self.model, path=self.path, kv_memory_bytes=memory, max_context=room, max_batch=1
            ) as cache:
                name = f"kvswap {budget}"
                self._take(name, cache)
                stats = cache.stats()
                self.waits[name].append((stats.write_wait_seconds, stats.wait_seconds))

    def _take(self, name: str, cache: Any) -> None:
        seconds, cpu_seconds = read(self.model, cache, self.ids, self.chunk)
        self.seconds[name].append(seconds)
        self.cpu_seconds[name].append(cpu_seconds)

    def rows(self) -> dict[str, dict[str, float]]:
        """The first round warms up allocators, threads and the file system."""
        rows = {}
        for name, all_seconds in self.seconds.items():
            seconds = all_seconds[1:]
            middle = statistics.median(seconds)
            row = {
                "seconds": round(middle, 3),
                "tokens_per_second": round(self.ids.shape[1] / middle, 1),
                "ratio_of_pairs": self._of_dynamic(self.seconds, name),
                "cpu_seconds": round(statistics.median(self.cpu_seconds[name][1:]), 3),
                "cpu_ratio_of_pairs": self._of_dynamic(self.cpu_seconds, name),
            }
            if name in self.waits:
                for index, what in enumerate(("writes", "reads")):
                    waited = statistics.median(each[index] for each in self.waits[name][1:])
                    row[f"share_waited_for_{what}"] = round(waited / middle, 4)
            rows[name] = row
        return rows

    @staticmethod
    def _of_dynamic(taken: dict[str, list[float]], name: str) -> float:
        pairs = zip(taken[name][1:], taken["DynamicCache"][1:], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)


def show(console: Console, model: str, tokens: int, chunk: int, rows: dict[str, Any]) -> None:
    table = Table(title=f"{model}, {tokens:,} tokens in chunks of {chunk:,}")
    for heading in ("", "s", "tokens/s", "to DynamicCache", "processor", "waited: writes", "reads"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        waits = [row.get(f"share_waited_for_{what}") for what in ("writes", "reads")]
        table.add_row(
            name,
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio_of_pairs']:.2f}x",
            f"{row['cpu_ratio_of_pairs']:.2f}x",
            *("" if wait is None else f"{100 * wait:.1f} %" for wait in waits),
        )
    console.print(table)


def main(
    model: Annotated[
        str, typer.Option(help=f"{REFERENCE}, a shape ({', '.join(SHAPES)}) or a folder")
    ] = REFERENCE,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    layers: Annotated[int, typer.Option(help="of a shape; 0: all that it has")] = 0,
    tokens: Annotated[int, typer.Option(help="length of the document")] = 8192,
    chunks: Annotated[str, typer.Option(help="tokens a pass, comma-separated")] = "512,4096",
    budgets: Annotated[
        str, typer.Option(help="shares of the KV cache, comma-separated; none: no budget")
    ] = "1/13,none",
    rounds: Annotated[int, typer.Option(help="that count")] = 3,
    threads: Annotated[int, typer.Option(help="0: as many as there are cores")] = 0,
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    described = machine.describe(path)
    loaded = open_model(model, tokens + NEW_TOKENS, layers, dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.config.vocab_size, (1, tokens), generator=generator)
    console = Console()
    results: dict[str, Any] = {
        "machine": described,
        "model": model,
        "layers": layers,
        "dtype": dtype,
        "tokens": tokens,
        "chunks": {},
    }
    for chunk in map(int, chunks.split(",")):
        measured = Rounds(loaded, ids, chunk, budgets.split(","), path)
        for _ in track(range(rounds + 1), description=f"chunks of {chunk}", console=console):
            measured.take()
        results["chunks"][str(chunk)] = measured.rows()
        show(console, model, tokens, chunk, measured.rows())
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
