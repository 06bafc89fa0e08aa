"""Is a rank for each layer, guessed from the prompt's own last queries, better than one for all?

    python -m bench.estimated_ranks --out estimated_ranks

What a cache without a calibration file could do (KVSwap, section 3.5, has one rank for all). Over
documents with facts and questions laid in, a projection is estimated from the document alone, as
the cache does; columns are then handed out greedily by the recall that the document's last queries
have, and the attention mass that the questions' own queries find is compared: one rank for all
layers, ranks from the last queries, from queries all over the second half, and the best that the
questions themselves would have given.
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
from bench.reading import REFERENCE, open_reading
from kvswap_torch.projection import Pair, flat_tokens, from_chunk, sum_over_heads
from kvswap_torch.tuning.costs import hand_out_ranks
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.recall import Choice, Steps, decoded_positions
from kvswap_torch.tuning.samples import Sample

RANKS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
UNIFORM = (8, 16, 24, 32, 48, 64)
PROMPT_QUERIES = 32
STEPS = 128
WAYS = ("uniform", "last queries", "queries all over", "the questions themselves")

Recall = dict[int, float]


def recall_of(seen: Observed, pair: Pair, positions: torch.Tensor) -> Recall:
    """Rank -> attention mass that the steps at `positions` find with their true query."""
    key, query = pair
    steps = Steps(seen, positions, Choice())
    rows = flat_tokens(seen.keys).float() @ key
    low = sum_over_heads(seen.query[:, :, positions], seen.keys.shape[1]) @ query
    found = {}
    for rank in RANKS:
        kept = rows[:, :rank].to(seen.keys.dtype).float()
        found[rank] = steps.recall(steps.select(steps.largest(low[:, :rank] @ kept.T)))
    return found


def measure(calibrator: Calibrator, sample: Sample) -> tuple[dict[str, list[Recall]], list[float]]:
    """For each way the layers' tables, and the seconds that a layer's guess takes."""
    tables: dict[str, list[Recall]] = {way: [] for way in WAYS[1:]}
    seconds = []
    tokens, focus = len(sample.ids), sample.focus

    def observe(seen: Observed) -> None:
        keys, query = seen.keys[:, :, :focus], seen.query[:, :, :focus]
        pair = from_chunk("query_aware", keys, query, RANKS[-1])
        began = time.perf_counter()
        last = recall_of(seen, pair, torch.arange(focus - PROMPT_QUERIES, focus))
        seconds.append(time.perf_counter() - began)
        spread = torch.linspace(focus // 2, focus - 1, PROMPT_QUERIES).long()
        tables["last queries"].append(last)
        tables["queries all over"].append(recall_of(seen, pair, spread))
        truth = recall_of(seen, pair, decoded_positions(tokens, focus, STEPS))
        tables["the questions themselves"].append(truth)

    calibrator.read(sample, observe)
    return tables, seconds


def compare(tables: dict[str, list[Recall]], rank: int) -> dict[str, float]:
    """Way -> recall of the questions at `rank` columns a layer on average, mean over layers."""
    truth = tables["the questions themselves"]

    def mean(ranks: tuple[int, ...]) -> float:
        return statistics.fmean(table[each] for table, each in zip(truth, ranks, strict=True))

    found = {"uniform": mean((rank,) * len(truth))}
    for way, table in tables.items():
        found[way] = mean(hand_out_ranks(table, sum, rank * len(truth)))
    return found


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of a document")] = 16384,
    documents: Annotated[int, typer.Option(help="how many")] = 4,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console()
    calibrator, samples = open_reading(model, length, documents)
    measured = [
        measure(calibrator, sample) for sample in track(samples, "reading", console=console)
    ]
    rows: list[dict[str, Any]] = []
    for rank in UNIFORM:
        each = [compare(tables, rank) for tables, _ in measured]
        means = {way: round(statistics.fmean(one[way] for one in each), 4) for way in WAYS}
        rows.append({"rank": rank, "recall": means})
    seconds = statistics.median(value for _, many in measured for value in many)
    results = {
        "machine": machine.describe("."),
        "model": model.resolve().name,
        "length": length,
        "documents": len(measured),
        "seconds_of_a_layers_guess": round(seconds, 3),
        "rows": rows,
    }
    table = Table(title=f"attention mass found, {length:,} tokens, {len(measured)} documents")
    for column in ("columns a layer", *WAYS):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row["rank"]), *(f"{row['recall'][way]:.3f}" for way in WAYS))
    console.print(table, f"a layer's guess takes {seconds:.2f} s")
    if out:
        console.print(f"wrote {machine.write(out, results).name}")


if __name__ == "__main__":
    typer.run(main)
