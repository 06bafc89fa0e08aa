"""What finds look-ups at so many columns: whose queries a projection is made for.

    python -m bench.projections --model build/models/smollm2 --out

Some documents fit, others are measured, all with facts and questions laid in. Projections are made
of the measured document's own prompt, as without a calibration; of the fitted documents' keys
alone; of their queries, all alike; and of their queries weighed by what they look up, as the tuner
does (`kvswap_torch.tuning.moments`). Rows are int4, scored by mass with true queries. Told are the
share of the look-ups found (`kvswap_torch.tuning.look_ups`, every step as much as any other) and
the attention mass held, mean over layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.reading import REFERENCE, open_reading
from kvswap_torch.projection import Pair, from_chunk
from kvswap_torch.tuning import moments as moments_module
from kvswap_torch.tuning.calibration import gather_moments
from kvswap_torch.tuning.look_ups import sources
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.recall import Choice, RecallTable, Steps, decoded_positions
from kvswap_torch.tuning.samples import Sample

STEPS = 64
COLUMNS = (8, 16, 24, 32, 48, 64)
GROUPS = (16, 46)
PROMPT = "the prompt's own"


def fitted(calibrator: Calibrator, samples: Sequence[Sample]) -> dict[str, list[Pair]]:
    """By name a projection a layer."""
    weight = moments_module.LOOK_UPS_WEIGHT
    try:
        moments_module.LOOK_UPS_WEIGHT = 0
        alike = gather_moments(calibrator, samples, "true", score="mass")
    finally:
        moments_module.LOOK_UPS_WEIGHT = weight
    weighed = gather_moments(calibrator, samples, "true", score="mass")
    return {
        "calibrated, SVD of the keys": [each.pair("svd_keys", COLUMNS[-1]) for each in alike],
        "calibrated, queries alike": [each.pair("query_aware", COLUMNS[-1]) for each in alike],
        "calibrated, by look-ups": [each.pair("query_aware", COLUMNS[-1]) for each in weighed],
    }


def measure(
    calibrator: Calibrator, samples: Sequence[Sample], pairs: dict[str, list[Pair]]
) -> dict[tuple[str, int], RecallTable]:
    """By projection and groups what each number of columns finds."""
    pairs = {PROMPT: [None] * calibrator.parts.shape.layers, **pairs}  # type: ignore[list-item]
    tables = {
        (name, groups): RecallTable(made, COLUMNS, "int4", "true")
        for name, made in pairs.items()
        for groups in GROUPS
    }

    def add(seen: Observed, sample: Sample) -> None:
        read = slice(0, sample.focus)
        pairs[PROMPT][seen.layer] = from_chunk(
            "query_aware", seen.keys[:, :, read], seen.query[:, :, read], COLUMNS[-1], score="mass"
        )
        positions = decoded_positions(len(sample.ids), sample.focus, STEPS)
        wanted = sources(sample.ids, positions)
        for groups in GROUPS:
            steps = Steps(seen, positions, Choice(groups_max=groups), wanted=wanted)
            for name in pairs:
                tables[name, groups].add(seen, steps)

    for sample in samples:
        calibrator.read(sample, lambda seen, of=sample: add(seen, of))
    return tables


def lines(tables: dict[tuple[str, int], RecallTable]) -> list[dict[str, Any]]:
    """A line for each projection, groups and columns."""
    found = []
    for (name, groups), table in tables.items():
        held, shares = table.recall(), table.found()
        for columns in COLUMNS:
            line = {"projection": name, "groups": groups, "columns": columns}
            line["found"] = round(sum(layer[columns] for layer in shares), 4)
            line["held"] = round(statistics.mean(layer[columns] for layer in held), 4)
            found.append(line)
    return found


def projection_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """For each number of groups and columns what each projection finds, and holds."""
    names = list(dict.fromkeys(line["projection"] for each in results for line in each["lines"]))
    yield f"| groups, columns | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for result in results:
        by_place: dict[tuple[int, int], list[str]] = {}
        for line in result["lines"]:
            cells = by_place.setdefault((line["groups"], line["columns"]), [])
            cells.append(f"{line['found']:.2f} ({line['held']:.2f})")
        for (groups, columns), cells in by_place.items():
            yield f"| {groups}, {columns} | {' | '.join(cells)} |"


def cells_of(row: str) -> list[str]:
    """Of a line of a table in markdown."""
    return [cell.strip() for cell in row.strip("| ").split(" | ")]


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of a document")] = 4096,
    fit: Annotated[int, typer.Option(help="documents that fit")] = 4,
    documents: Annotated[int, typer.Option(help="documents that are measured")] = 4,
    out: Annotated[bool, typer.Option(help="write bench/results/projections_MODEL.json")] = False,
) -> None:
    console = Console(width=110)
    calibrator, samples = open_reading(model, length, fit + documents)
    with console.status("fitting, then measuring"):
        pairs = fitted(calibrator, samples[documents:])
        measured = lines(measure(calibrator, samples[:documents], pairs))
    head, *rows = projection_rows([{"lines": measured}])
    table = Table(*cells_of(head), title=f"look-ups found (mass held), {length:,} tokens")
    for row in rows[1:]:
        table.add_row(*cells_of(row))
    console.print(table)
    if out:
        name = model.resolve().name
        facts = {"machine": machine.describe("."), "model": name, "length": length}
        results = facts | {"fit": fit, "documents": documents, "lines": measured}
        console.print(f"wrote {machine.write(f'projections_{name}', results).name}")


if __name__ == "__main__":
    typer.run(main)
