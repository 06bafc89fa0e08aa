"""Does what a calibration finds rank settings as the divergence of answers does?

    python -m bench.quality --model build/models/smollm2 --lengths 4096 --documents 1
        --tasks needle,multi-key,turns --out ranked_smollm2 --methods
        "full kvswap:rank=8,groups=32,dtype=int8,score=mass,query=true,question=exact ..."
    python -m bench.rank_settings --model build/models/smollm2 --measured ranked_smollm2
        --out

Settings are those of the measured methods. What is predicted comes from another document, with
other questions, as the tuner takes it (`kvswap_torch.tuning.recall.worth`); what is measured is the
mean divergence from the full cache over all answers' tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.lookups import Lookups, Setting
from bench.quality.methods import parse
from bench.reading import REFERENCE, open_reading
from kvswap_torch.tuning.recall import worth

LEAST = 20  # settings


def measured_settings(methods: dict[str, Any]) -> dict[Setting, float]:
    """Divergence in nats by setting, of the methods that say columns, groups and dtype."""
    found = {}
    for name, method in methods.items():
        family, said = parse(name)
        if family == "kvswap" and said.get("score") == "mass" and {"rank", "groups"} <= set(said):
            setting = int(said["rank"]), int(said["groups"]), said.get("dtype", "int8")
            found[setting] = method["tasks"]["asked"]["kl"][0]
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Places in rising order, from 0; equals share theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, -1 to 1; 0 where one side is all the same."""
    sides = []
    for values in (ranks(first), ranks(second)):
        mean = sum(values) / len(values)
        sides.append([value - mean for value in values])
    product = sum(a * b for a, b in zip(*sides, strict=True))
    sizes = [sum(a * a for a in side) for side in sides]
    return product / (sizes[0] * sizes[1]) ** 0.5 if all(sizes) else 0.0


def predictions(row: dict[str, Any]) -> dict[str, float]:
    """By what they are made of; more is better."""
    held, found = row["held"], row["found_by_step"]
    (layer,) = worth([{0: held}], [{0: found}])
    return {
        "attention mass held": held,
        "look-ups found, every look-up alike": row["found"],
        "look-ups found, every step alike": found,
        "what the tuner takes (`worth`)": layer[0],
    }


def ranked_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each prediction."""
    yield "| model, settings | predicted by | rank correlation |"
    yield "|---|---|---|"
    for result in results:
        title = f"{result['model']}, {len(result['settings'])}"
        for name, value in result["correlations"].items():
            yield f"| {title} | {name} | {value:.2f} |"
            title = ""


def main(
    measured: Annotated[str, typer.Option(help="name of the answers' results, of bench.quality")],
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of a document")] = 4096,
    documents: Annotated[int, typer.Option(help="that predict")] = 1,
    out: Annotated[bool, typer.Option(help="write bench/results/ranked_MODEL.json")] = False,
) -> None:
    console = Console(width=100)
    results = json.loads((machine.RESULTS / "quality" / f"{measured}.json").read_text())
    (part,) = results["lengths"].values()
    answers = measured_settings(part["methods"])
    if len(answers) < LEAST:
        raise typer.BadParameter(
            f"--measured: must have at least {LEAST} settings by mass, got {len(answers)}"
        )
    calibrator, samples = open_reading(model, length, documents)
    lookups = Lookups(list(answers))
    for sample in track(samples, "reading", console=console):
        calibrator.read(sample, lambda seen, of=sample: lookups.add(seen, of))
    rows = lookups.as_dict()["settings"]
    for row, divergence in zip(rows, answers.values(), strict=True):
        row["kl"] = divergence
    closeness = [-row["kl"] for row in rows]
    told = [predictions(row) for row in rows]
    correlations = {
        name: round(rank_correlation([each[name] for each in told], closeness), 3)
        for name in told[0]
    }
    table = Table("predicted by", "rank correlation", title=f"{len(rows)} settings")
    for name, value in correlations.items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    if out:
        facts = {"machine": machine.describe("."), "model": model.resolve().name, "length": length}
        facts |= {"measured": measured, "documents": documents, "correlations": correlations}
        name = f"ranked_{model.resolve().name}"
        console.print(f"wrote {machine.write(name, facts | {'settings': rows}).name}")


if __name__ == "__main__":
    typer.run(main)
