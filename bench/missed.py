"""Is the estimate of missed attention right, and what does it cost?

    python -m bench.missed --model build/models/smollm2 --tokens 4096 --out missed_smollm2

One document is read and continued twice, token for token as it was written: with looks that read a
few groups, and with looks that read every group, which is the true share. Then the time of a step
with the looks that `--every` and `--groups` ask for, and without, in turn.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.tuning.documents import default_samples

ALL = 4096  # groups: of any document here


@dataclass
class Runs:
    """A document, and what its continuation needs."""

    model: Any
    ids: torch.Tensor  # [1, tokens]
    steps: int
    config: SwapConfig
    path: Path

    @torch.inference_mode()
    def follow(self, every: int, groups: int, limit: float | None = None) -> tuple[Any, float]:
        """What `stats()` says at the end, and the mean seconds of a step."""
        config = replace(self.config, audit_every=every, audit_groups=groups, missed_mass_max=limit)
        begun = self.ids.shape[1] - self.steps
        with KVSwapCache(self.model, path=self.path, config=config) as cache:
            self.model(input_ids=self.ids[:, :begun], past_key_values=cache, logits_to_keep=1)
            seconds = []
            for at in range(begun, self.ids.shape[1]):
                began = time.perf_counter()
                self.model(input_ids=self.ids[:, at : at + 1], past_key_values=cache)
                seconds.append(time.perf_counter() - began)
            return cache.stats(), statistics.mean(seconds)


def by_layer(stats: Any, start: str = "missed_mass_") -> list[float]:
    names = sorted(
        (name for name in stats.counters if re.fullmatch(f"{start}[0-9]+", name)),
        key=lambda name: int(name.rsplit("_", 1)[1]),
    )
    return [stats.counters[name] for name in names]


def kept_below(runs: Runs, every: int, groups: int, limit: float) -> dict[str, Any]:
    """One run with missed_mass_max; what is missed is the mean of all its looks."""
    stats, _ = runs.follow(every, groups, limit)
    now = by_layer(stats, "groups_now_")
    return {
        "missed_mass_max": limit,
        "every": every,
        "missed": stats.missed_mass,
        "groups_now": now,
        "groups_now_mean": statistics.mean(now),
        "excess": stats.missed_mass_excess,
    }


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table(title=f"{results['model']}, {results['tokens']:,} tokens")
    for heading in ("layer", "estimated", "true"):
        table.add_column(heading, justify="right")
    pairs = zip(results["estimated_by_layer"], results["true_by_layer"], strict=True)
    for layer, (estimated, true) in enumerate(pairs):
        table.add_row(str(layer), f"{estimated:.1%}", f"{true:.1%}")
    estimated = f"{results['estimated']:.1%} ± {results['estimated_error']:.1%}"
    table.add_row("all", estimated, f"{results['true']:.1%}")
    console.print(table)
    console.print(
        f"looks every {results['every']} steps: a step takes {results['step_ratio']:.3f}x"
        f" ({results['step_ratios']})"
    )
    if limit := results.get("limit"):
        console.print(
            f"missed_mass_max {limit['missed_mass_max']:.0%}: {limit['missed']:.1%} missed in all,"
            f" {limit['groups_now_mean']:.0f} groups a layer at the end,"
            f" {limit['excess']:.1%} above it in the worst layer that has all its pages"
        )


def main(
    model: Annotated[str, typer.Option(help="folder of a model and its tokenizer")],
    tokens: Annotated[int, typer.Option(help="of the document, continuation included")] = 4096,
    steps: Annotated[int, typer.Option(help="tokens of the continuation")] = 128,
    groups_max: Annotated[int, typer.Option(help="groups that a step selects")] = 100,
    score: Annotated[str, typer.Option(help="as the setting")] = "mass",
    every: Annotated[int, typer.Option(help="steps between looks, where time is measured")] = 64,
    groups: Annotated[int, typer.Option(help="groups that a look reads")] = 16,
    rounds: Annotated[int, typer.Option(help="pairs of timed runs", min=1)] = 5,
    limit: Annotated[float, typer.Option(help="missed_mass_max; 0: not tried")] = 0,
    pages: Annotated[int, typer.Option(help="pages_max, in groups_max")] = 2,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    described = machine.describe(path)
    loaded = load_model(str(model), "bfloat16")
    tokenizer = load_tokenizer(str(model))
    _, held_out = default_samples(tokenizer, lengths=(tokens,), count=2)
    ids = torch.as_tensor(held_out[0].ids)[None, :tokens]
    config = SwapConfig(
        groups_max=groups_max,
        pages_max=pages * groups_max,
        rank=16,
        summary_dtype="int8",
        score=score,
    )
    runs = Runs(loaded, ids, steps, config, path)
    console = Console()
    estimate, _ = runs.follow(1, groups)
    truth, _ = runs.follow(1, ALL)
    ratios = []
    for _ in track(range(rounds), description="timing", console=console):
        (_, plain), (_, looking) = runs.follow(0, groups), runs.follow(every, groups)
        ratios.append(round(looking / plain, 3))
    results = {
        "machine": described,
        "model": Path(model).name,
        "tokens": ids.shape[1],
        "steps": steps,
        "settings": {"groups_max": groups_max, "score": score, "audit_groups": groups},
        "estimated": estimate.missed_mass,
        "estimated_error": estimate.missed_mass_error,
        "estimated_by_layer": by_layer(estimate),
        "true": truth.missed_mass,
        "true_by_layer": by_layer(truth),
        "every": every,
        "step_ratio": statistics.median(ratios),
        "step_ratios": ratios,
    }
    if limit > 0:
        results["limit"] = kept_below(runs, 4, groups, limit)
    show(console, results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
