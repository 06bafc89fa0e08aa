"""A million tokens: how decoding grows with the context when the KV cache is on disk.

    python -m bench.million --path build --out million

Fills one cache step by step to the whole context with random keys and values, and decodes at each
size, one token with it and one with a full cache of as many tokens as are selected (`floor`: the
model's own work). What grows is scoring, which reads the whole summary at every step.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.contenders import (
    FILL_TOKENS,
    SELECTED_TOKENS,
    Contender,
    TokenClock,
    open_floor,
    set_random_projections,
)
from bench.shapes import SHAPES, Shape, make_model
from kvswap_torch import KVSwapCache, SwapConfig, format_bytes, parse_bytes

GROUP_TOKENS = 4
WARM_UP = 4
FIRST = 1 << 16  # tokens of the first size; each is twice the one before


def open_cache(
    model: Any, shape: Shape, path: Path, rows: tuple[str, int], memory: str, context: int
) -> Contender:
    """A cache with random projections, empty."""
    dtype, rank = rows
    groups = SELECTED_TOKENS // GROUP_TOKENS
    config = SwapConfig(
        group_tokens=GROUP_TOKENS,
        rank=rank // 2,  # doubled by a cache that has no projection file
        summary_dtype=dtype,
        groups_max=groups,
        pages_max=3 * groups // 2,
        select_queries_max=1,
        look_ahead=True,
    )
    cache = KVSwapCache(
        model,
        path=path,
        config=config,
        kv_memory_bytes=memory,
        max_context=context + 4096,
        max_batch=1,
    )
    width = shape.kv_heads * shape.head_dim
    set_random_projections(cache.driver.session, range(shape.layers), width, rank)
    return Contender("kvswap", model, cache, 1, 0)


def fill_to(contender: Contender, shape: Shape, context: int, console: Console) -> float:
    """Appends random tokens up to `context`; seconds."""
    session, began = contender.cache.driver.session, time.perf_counter()
    session.begin_pass("prefill")
    begins = range(contender.position, context, FILL_TOKENS)
    for begin in track(begins, f"filling to {context:,}", console=console, transient=True):
        tokens = min(FILL_TOKENS, context - begin)
        for layer in range(shape.layers):
            keys = torch.randn(1, shape.kv_heads, tokens, shape.head_dim).bfloat16()
            session.append(layer, keys, keys.flip(-1))
    contender.position = context
    return time.perf_counter() - began


def decode(ours: Contender, floor: Contender, clock: TokenClock, steps: int) -> dict[str, Any]:
    """A token of each in turn."""
    context = ours.position
    for _ in range(WARM_UP):
        ours.step(), floor.step()
    ours.seconds, floor.seconds = [], []
    clock.restart()
    for _ in range(steps):
        ours.step(), floor.step()
    parts = clock.milliseconds(ours.seconds)
    total = 1e3 * statistics.mean(ours.seconds)
    low, _, high = statistics.quantiles(ours.seconds, n=4)
    return {
        "context": context,
        "ms_per_token": round(1e3 * ours.median(0), 2),
        "ms_quartiles": [round(1e3 * low, 2), round(1e3 * high, 2)],
        "floor_ms_per_token": round(1e3 * floor.median(0), 2),
        "time_of_a_token_ms": parts,
        "scoring_share": round(parts["select"] / total, 3),
    }


def account(ours: Contender) -> dict[str, Any]:
    """Memory by the cache's own account and from outside."""
    stats = ours.cache.stats()
    return {
        "kv_bytes_full": stats.kv_bytes_full,
        "kv_memory_bytes": stats.resident_bytes_peak,
        "ledger": dict(stats.ledger),
        "memory_share": round(stats.resident_bytes_peak / stats.kv_bytes_full, 4),
        "anonymous_bytes": machine.memory_bytes(),
        "bytes_read_per_token": round(stats.bytes_read_per_token),
        "reader": f"{stats.reader}, {stats.io_mode}",
    }


def main(
    shape_name: Annotated[str, typer.Option("--shape", help=", ".join(SHAPES))] = "small",
    context: Annotated[int, typer.Option(help="tokens in the end")] = 1 << 20,
    rank: Annotated[int, typer.Option(help="columns of the summary")] = 32,
    rows: Annotated[str, typer.Option(help="what they are kept in: int8, int4")] = "int8",
    kv_memory: Annotated[str, typer.Option(help="hard limit")] = "1GiB",
    steps: Annotated[int, typer.Option(help="tokens to decode at each size")] = 24,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("."),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console, shape = Console(), SHAPES[shape_name]
    model = make_model(shape, context + 4096)
    before = machine.memory_bytes()
    ours = open_cache(model, shape, path, (rows, rank), kv_memory, context)
    floor = open_floor(model, shape, 1)
    clock = TokenClock(ours.cache)
    sizes, fill_seconds = [], 0.0
    wanted = [FIRST << i for i in range(30) if FIRST << i < context] + [context]
    for size in wanted:
        fill_seconds += fill_to(ours, shape, size, console)
        sizes.append(decode(ours, floor, clock, steps))
    results = {
        "machine": machine.describe(path),
        "shape": shape_name,
        "layers": shape.layers,
        "kv_memory_limit_bytes": parse_bytes(kv_memory),
        "rank": rank,
        "rows": rows,
        "fill_seconds": round(fill_seconds, 1),
        "anonymous_bytes_before": before,
        "sizes": sizes,
    } | account(ours)
    _print(console, results)
    if out:
        console.print(f"wrote {machine.write(out, results).name}")
    ours.close()
    floor.close()


def _print(console: Console, results: dict[str, Any]) -> None:
    table = Table(title=f"{results['shape']}, {results['layers']} layers, one sequence")
    for column in ("context", "ms per token", "quartiles", "floor", "scoring", "its share"):
        table.add_column(column, justify="right")
    for size in results["sizes"]:
        table.add_row(
            f"{size['context']:,}",
            f"{size['ms_per_token']:.1f}",
            "{:.1f} - {:.1f}".format(*size["ms_quartiles"]),
            f"{size['floor_ms_per_token']:.1f}",
            f"{size['time_of_a_token_ms']['select']:.1f}",
            f"{size['scoring_share']:.0%}",
        )
    console.print(table)
    grown = results["anonymous_bytes"] - results["anonymous_bytes_before"]
    console.print(
        f"KV memory at most {format_bytes(results['kv_memory_bytes'])} of "
        f"{format_bytes(results['kv_bytes_full'])} ({results['memory_share']:.1%}), the process "
        f"grew by {format_bytes(grown)}; {format_bytes(results['bytes_read_per_token'])} read per "
        f"token, {results['reader']}; filled in {results['fill_seconds']:.0f} s"
    )


if __name__ == "__main__":
    typer.run(main)
