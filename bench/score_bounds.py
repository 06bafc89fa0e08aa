"""Could scoring read less than the whole summary?

    python -m bench.score_bounds --out score_bounds

Every step scores every group (KVSwap, section 3.3), which is what grows with the context. Over
documents with facts and questions laid in, three ways to read less are tried on the queries of the
questions:

- boxes: least and greatest value of each column over a block of tokens bound the block's scores;
  a block whose bound stays below the last score chosen need not be read. The choice is exact.
- columns: the first columns are read for every token, the rest only where the first columns' part
  and the product of the rests' norms (Cauchy-Schwarz) do not rule the group out. Exact, too.
- two stages: the best groups by the first columns alone are scored in full. Not exact: what is
  told is how much of the choice is still made; beside it that of the first columns alone.

The traffic of a way is in parts of what scoring reads today, norms and boxes included.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.reading import REFERENCE, open_reading
from kvswap_torch.projection import flat_tokens, from_chunk, sum_over_heads
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.recall import decoded_positions
from kvswap_torch.tuning.samples import Sample

RANK = 32
GROUP = 4  # tokens
CHOSEN = 100  # groups
STEPS = 64
BLOCKS = (16, 64, 256)  # tokens
COLUMNS = (8, 12, 16)
STAGE_COLUMNS = 12
SHARES = (0.1, 0.2, 0.4)  # of the groups, scored in the second stage

Found = dict[str, tuple[float, float]]  # way -> traffic, share of the choice still made


def boxes(low: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, block: int) -> float:
    """Traffic when blocks are ruled out by their box; `last`: the lowest score chosen, by step."""
    blocks = rows.unflatten(0, (-1, block))
    least, greatest = blocks.amin(1), blocks.amax(1)
    bound = torch.maximum(low[:, None] * least, low[:, None] * greatest).sum(-1)
    return (bound >= last).float().mean().item() + 2 / block


def columns(low: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, first: int) -> float:
    """Traffic when groups are ruled out by their first columns and the norm of the rest."""
    bound = low[:, :first] @ rows[:, :first].T
    bound += low[:, first:].norm(dim=1)[:, None] * rows[:, first:].norm(dim=1)
    kept = (by_group(bound) >= last).float().mean().item()
    rank = rows.shape[1]
    return (first + 1 + kept * (rank - first)) / rank


def two_stages(
    low: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, first: int, share: float
) -> tuple[float, float]:
    """Traffic, and the share of the choice still made."""
    scores = by_group(low[:, :first] @ rows[:, :first].T)
    best = scores.topk(max(CHOSEN, round(share * scores.shape[1])), dim=1).indices
    is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    rank = rows.shape[1]
    return (first + share * (rank - first)) / rank, is_kept.gather(1, chosen).float().mean().item()


def alone(low: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, first: int) -> float:
    """Share of the choice that the first columns alone, a lower rank, would make too."""
    scores = by_group(low[:, :first] @ rows[:, :first].T)
    is_chosen = torch.zeros_like(scores, dtype=torch.bool)
    is_chosen.scatter_(1, scores.topk(CHOSEN, dim=1).indices, True)
    return is_chosen.gather(1, chosen).float().mean().item()


def by_group(scores: torch.Tensor) -> torch.Tensor:
    """[steps, tokens] -> [steps, groups], the greatest of each."""
    return scores.unflatten(1, (-1, GROUP)).amax(2)


def measure_layer(seen: Observed, sample: Sample) -> Found:
    """Every way in one layer, on the true queries of the questions."""
    keys, query = seen.keys[:, :, : sample.focus], seen.query[:, :, : sample.focus]
    key_side, query_side = from_chunk("query_aware", keys, query, RANK)
    rows = flat_tokens(keys).float() @ key_side
    rows = rows[: len(rows) // max(BLOCKS) * max(BLOCKS)]
    steps = decoded_positions(len(sample.ids), sample.focus, STEPS)
    low = sum_over_heads(seen.query[:, :, steps], keys.shape[1]) @ query_side
    best = by_group(low @ rows.T).topk(CHOSEN, dim=1)
    last = best.values[:, -1:]
    found: Found = {f"box of {n} tokens": (boxes(low, rows, last, n), 1.0) for n in BLOCKS}
    for first in COLUMNS:
        way = f"{first} of {RANK} columns, then what they do not rule out"
        found[way] = (columns(low, rows, last, first), 1.0)
        found[f"{first} of {RANK} columns alone"] = (
            first / RANK,
            alone(low, rows, best.indices, first),
        )
    for share in SHARES:
        way = f"{STAGE_COLUMNS} of {RANK} columns, then the best {share:.0%} of groups"
        found[way] = two_stages(low, rows, best.indices, STAGE_COLUMNS, share)
    return found


def measure(calibrator: Calibrator, sample: Sample) -> list[Found]:
    """Every way, by layer."""
    layers: list[Found] = []
    calibrator.read(sample, lambda seen: layers.append(measure_layer(seen, sample)))
    return layers


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of a document")] = 16384,
    documents: Annotated[int, typer.Option(help="how many")] = 4,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console(width=110)
    calibrator, samples = open_reading(model, length, documents)
    layers = [
        found
        for sample in track(samples, "reading", console=console)
        for found in measure(calibrator, sample)
    ]
    ways: list[dict[str, Any]] = []
    table = Table(title=f"scoring, {length:,} tokens, {documents} documents, all layers")
    for column in ("way", "traffic", "in the worst layer", "of the choice", "in the worst layer"):
        table.add_column(column, justify="right")
    for way in layers[0]:
        traffic, kept = zip(*(found[way] for found in layers), strict=True)
        numbers = statistics.fmean(traffic), max(traffic), statistics.fmean(kept), min(kept)
        names = ("traffic", "traffic_worst", "kept", "kept_worst")
        rounded = {name: round(value, 3) for name, value in zip(names, numbers, strict=True)}
        ways.append({"way": way} | rounded)
        table.add_row(way, *(f"{number:.2f}" for number in numbers))
    console.print(table)
    if out:
        results = {
            "machine": machine.describe("."),
            "model": model.resolve().name,
            "length": length,
            "documents": documents,
            "ways": ways,
        }
        console.print(f"wrote {machine.write(out, results).name}")


if __name__ == "__main__":
    typer.run(main)
