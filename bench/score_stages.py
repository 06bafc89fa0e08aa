"""Does a choice by attention mass hold when most groups are scored by few columns only?

    python -m bench.score_stages --model build/models/smollm2 --length 4096 --out

A score by mass costs the products of every head with every row of the summary. In two stages all
groups are scored by the first columns, and only the best of them by all columns. The first stage
is the mass by those columns, or the largest product of any head, which needs no exponential.
Documents have facts and questions laid in, rows are int8 and projections from the document, as
without a calibration; queries are the questions' own. Beside the share of the choice still made
stand the attention held and the look-ups found (see `kvswap_torch.tuning.recall`), in parts of what
the choice by all columns has. Traffic is in parts of what scoring reads today.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.reading import REFERENCE, open_reading
from kvswap_torch.methods.kvswap import kept_rows
from kvswap_torch.projection import flat_tokens, from_chunk
from kvswap_torch.tuning.look_ups import sources
from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.recall import (
    Choice,
    Steps,
    decoded_positions,
)
from kvswap_torch.tuning.samples import Sample

RANK = 32  # the most columns
STEPS = 64
COLUMNS = (8, 12, 16)
SHARES = (0.1, 0.2, 0.4)  # of the groups, scored in the second stage
STAGES = ("mass", "product")  # what the first stage scores by


@dataclass(frozen=True)
class Kept:
    """What one way makes of a layer's choices, summed over steps.

    Parameters
    ----------
    chosen
        Share of the groups that scoring by all columns chooses.
    held, held_by_all
        Attention mass in the choice, and in that by all columns; sinks and tail apart.
    found, found_by_all
        As these, of look-ups.
    """

    chosen: float
    held: float
    held_by_all: float
    found: float
    found_by_all: float


class Scores:
    """What a layer's groups score in each step, by some of the columns.

    Parameters
    ----------
    seen
        The layer's queries and keys over `sample`.
    rank, summary_dtype
        Of the rows: all columns share a row's scale, however many a score looks at.
    """

    def __init__(
        self,
        seen: Observed,
        sample: Sample,
        steps: Steps,
        rank: int = RANK,
        summary_dtype: str = "int8",
    ):
        keys, query = seen.keys[:, :, : sample.focus], seen.query[:, :, : sample.focus]
        key_side, query_side = from_chunk("query_aware", keys, query, rank, score="mass")
        self._rows = kept_rows(flat_tokens(seen.keys).float() @ key_side, summary_dtype)
        heads, kv_heads = seen.query.shape[1], seen.keys.shape[1]
        sides = query_side.unflatten(0, (kv_heads, -1)).repeat_interleave(heads // kv_heads, 0)
        self._low = seen.query[0][:, steps.positions].float() @ sides * seen.scale
        self._steps = steps

    def by_mass(self, columns: int, groups: torch.Tensor) -> torch.Tensor:
        """Each head's softmax over `groups` ``[steps, groups]`` bool, summed: as `groups`, fp32."""
        hidden = ~self._tokens(groups)
        total = torch.zeros(groups.shape)
        for logits in self._products(columns):
            weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1).nan_to_num_(0.0)
            total += self._steps.shares(weights)
        return total

    def by_product(self, columns: int) -> torch.Tensor:
        """The largest product of any head with a group's tokens, ``[steps, groups]``."""
        largest = [self._steps.largest(logits) for logits in self._products(columns)]
        return torch.stack(largest).amax(0)

    def _products(self, columns: int):
        rows = self._rows[:, :columns]
        return (kept_rows(low, "int8")[:, :columns] @ rows.T for low in self._low)

    def _tokens(self, groups: torch.Tensor) -> torch.Tensor:
        spread = groups.repeat_interleave(self._steps.choice.group_tokens, 1)
        return torch.nn.functional.pad(spread, (0, len(self._rows) - spread.shape[1]))


def best_of(scores: torch.Tensor, choosable: torch.Tensor, share: float, least: int) -> Any:
    """The best of the choosable groups, ``[steps, groups]`` bool: a share of all, or `least`."""
    count = min(scores.shape[1], max(least, round(share * scores.shape[1])))
    best = scores.masked_fill(~choosable, -torch.inf).topk(count, dim=1).indices
    return torch.zeros_like(choosable).scatter_(1, best, True) & choosable


def ways_of(scores: Scores, steps: Steps) -> dict[tuple[str, float], torch.Tensor]:
    """(way, traffic) -> the groups it chooses, ``[steps, M]``."""
    ways = {}
    for first in COLUMNS:
        stages = {
            "mass": scores.by_mass(first, steps.choosable),
            "product": scores.by_product(first),
        }
        for stage in STAGES:
            what = f"{first} of {RANK} columns by {stage}"
            ways[f"{what} alone", first / RANK] = steps.select(stages[stage])
            for share in SHARES:
                kept = best_of(stages[stage], steps.choosable, share, steps.choice.groups_max)
                second = scores.by_mass(RANK, kept).masked_fill_(~kept, -1.0)
                traffic = (first + share * (RANK - first)) / RANK
                ways[f"{what}, then the best {share:.0%}", traffic] = steps.select(second)
    return ways


def measure_layer(seen: Observed, sample: Sample, chosen: int) -> dict[tuple[str, float], Kept]:
    """Every way in one layer, on the true queries of the questions."""
    positions = decoded_positions(len(sample.ids), sample.focus, STEPS)
    wanted = sources(sample.ids, positions)
    steps = Steps(seen, positions, Choice(groups_max=chosen), wanted=wanted)
    scores = Scores(seen, sample, steps)
    by_all = steps.select(scores.by_mass(RANK, steps.choosable))
    is_chosen = torch.zeros_like(steps.choosable).scatter_(1, by_all, True)

    def held(groups: torch.Tensor) -> float:
        return steps.mass.gather(1, groups).sum(1).mean().item()

    return {
        way: Kept(
            is_chosen.gather(1, groups).float().mean().item(),
            held(groups),
            held(by_all),
            steps.found(groups).mean().item(),
            steps.found(by_all).mean().item(),
        )
        for way, groups in ways_of(scores, steps).items()
    }


def summarised(layers: list[Kept]) -> dict[str, float | None]:
    """Over layers and documents; a layer that looks nothing up does not count for look-ups."""
    found = sum(kept.found_by_all for kept in layers)
    numbers = {
        "chosen": statistics.fmean(kept.chosen for kept in layers),
        "chosen_worst": min(kept.chosen for kept in layers),
        "held": sum(kept.held for kept in layers) / sum(kept.held_by_all for kept in layers),
        "found": sum(kept.found for kept in layers) / found if found else None,
    }
    return {name: value and round(value, 3) for name, value in numbers.items()}


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of a document")] = 4096,
    documents: Annotated[int, typer.Option(help="how many")] = 2,
    chosen: Annotated[int, typer.Option(help="groups of 4 tokens")] = 100,
    out: Annotated[bool, typer.Option(help="write bench/results/score_stages_MODEL.json")] = False,
) -> None:
    console = Console(width=110)
    calibrator, samples = open_reading(model, length, documents)
    layers: list[dict[tuple[str, float], Kept]] = []
    for sample in track(samples, "reading", console=console):
        calibrator.read(
            sample, lambda seen, of=sample: layers.append(measure_layer(seen, of, chosen))
        )
    ways: list[dict[str, Any]] = []
    name = model.resolve().name
    table = Table(title=f"{name}, {length:,} tokens, {documents} documents, {chosen} groups")
    for column in ("way", "traffic", "of the choice", "worst layer", "held", "found"):
        table.add_column(column, justify="right")
    for way, traffic in layers[0]:
        numbers = summarised([layer[way, traffic] for layer in layers])
        ways.append({"way": way, "traffic": round(traffic, 3)} | numbers)
        shown = ("-" if value is None else f"{value:.2f}" for value in numbers.values())
        table.add_row(way, f"{traffic:.2f}", *shown)
    console.print(table)
    if out:
        results = {
            "machine": machine.describe("."),
            "model": name,
            "length": length,
            "documents": documents,
            "chosen": chosen,
            "ways": ways,
        }
        console.print(f"wrote {machine.write(f'score_stages_{name}', results).name}")


if __name__ == "__main__":
    typer.run(main)
