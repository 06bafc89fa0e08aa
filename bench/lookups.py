"""Which layers and heads look answers up, and what of it is found with so many columns and groups?

    python -m bench.lookups --model build/models/smollm2 --settings 32x26,16x13,32x13xint4 --out

A look-up is a head with a tenth of its mass where the next two tokens stand in the text already, or
just before (`kvswap_torch.tuning.look_ups`). Documents have facts and questions laid in; rows are
int8 or int4, scored by mass, their projections from the document, as without a calibration. The
oracle takes as many groups by the attention itself, mean over heads: what it misses, no score of
the same kind could find.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.reading import REFERENCE, open_reading
from bench.score_stages import STEPS, Scores
from kvswap_torch.methods.kvswap import SUMMARY_LEVELS
from kvswap_torch.tuning.look_ups import of_heads, shares_found, sources
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.recall import Choice, Steps, decoded_positions
from kvswap_torch.tuning.samples import Sample

LAYERS_SHOWN = 10
Setting = tuple[int, int, str]  # columns, groups, the summary's dtype


class Lookups:
    """Sums over steps and documents, by layer; each ``[heads]``.

    `held`: the attention mass that choices hold, sinks and tail included, by layer and document.
    `by_step`: look-ups found in each step, summed over heads, by layer and document.
    """

    def __init__(self, settings: list[Setting]):
        self.settings = settings
        self.sought: dict[int, Any] = defaultdict(float)
        self.found: dict[Setting, dict[int, Any]] = {each: defaultdict(float) for each in settings}
        self.oracle: dict[Setting, dict[int, Any]] = {each: defaultdict(float) for each in settings}
        self.held: dict[Setting, list[float]] = {each: [] for each in settings}
        self.sought_by_step: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.by_step: dict[Setting, dict[int, list[torch.Tensor]]] = {
            each: defaultdict(list) for each in settings
        }

    def add(self, seen: Observed, sample: Sample) -> None:
        """One layer of one document, on the true queries of its questions."""
        positions = decoded_positions(len(sample.ids), sample.focus, STEPS)
        steps = Steps(seen, positions, Choice())
        looked_up = _looked_up(seen, positions, sources(sample.ids, positions), steps)
        self.sought[seen.layer] += looked_up.sum((1, 2))
        self.sought_by_step[seen.layer].append(looked_up.sum((0, 2)))
        masses: dict[tuple[int, str], torch.Tensor] = {}
        for setting in self.settings:
            columns, groups, dtype = setting
            if (columns, dtype) not in masses:
                scores = Scores(seen, sample, steps, columns, dtype)
                masses[columns, dtype] = scores.by_mass(columns, steps.choosable)
            chosen, wanted = (
                mass.masked_fill(~steps.choosable, -1.0).topk(groups, dim=1).indices
                for mass in (masses[columns, dtype], steps.mass)
            )
            mass_held = steps.always + steps.mass.gather(1, chosen).sum(1)
            self.held[setting].append(float(mass_held.mean()))
            for by, best in ((self.found, chosen), (self.oracle, wanted)):
                held = looked_up.gather(2, best.expand(len(looked_up), -1, -1))
                by[setting][seen.layer] += held.sum((1, 2))
                if by is self.found:
                    self.by_step[setting][seen.layer].append(held.sum((0, 2)))

    def _found_by_step(self, setting: Setting) -> float:
        """`shares_found` of all layers."""
        layers = sorted(self.sought_by_step)
        found = [{0: self.by_step[setting][layer]} for layer in layers]
        shares = shares_found(found, [self.sought_by_step[layer] for layer in layers])
        return round(sum(layer[0] for layer in shares), 4)

    def as_dict(self) -> dict[str, Any]:
        """Shares of what is sought: in all, and in the layers that seek most."""
        whole = sum(part.sum() for part in self.sought.values())
        order = sorted(self.sought, key=lambda layer: -float(self.sought[layer].sum()))
        return {
            "layers": len(order),
            "settings": [
                {
                    "columns": setting[0],
                    "groups": setting[1],
                    "summary_dtype": setting[2],
                    "found": _share(self.found[setting], self.sought, order),
                    "found_by_step": self._found_by_step(setting),
                    "held": round(statistics.mean(self.held[setting]), 4),
                    "oracle": _share(self.oracle[setting], self.sought, order),
                }
                for setting in self.settings
            ],
            "by_layer": [
                self._layer(layer, float(self.sought[layer].sum() / whole))
                for layer in order[:LAYERS_SHOWN]
            ],
        }

    def _layer(self, layer: int, share: float) -> dict[str, Any]:
        sought = self.sought[layer]
        head = int(sought.argmax())
        return {
            "layer": layer,
            "share": round(share, 3),
            "head": head,
            "head_share": round(float(sought[head] / sought.sum()), 3),
            "found": [_share(self.found[each], self.sought, [layer]) for each in self.settings],
            "oracle": [_share(self.oracle[each], self.sought, [layer]) for each in self.settings],
        }


def _share(found: dict[int, Any], sought: dict[int, Any], layers: list[int]) -> float:
    whole = sum(float(sought[layer].sum()) for layer in layers)
    return round(sum(float(found[layer].sum()) for layer in layers) / max(whole, 1e-30), 3)


def _looked_up(
    seen: Observed, positions: torch.Tensor, wanted: torch.Tensor, steps: Steps
) -> torch.Tensor:
    """Weights of look-ups by group: ``[heads, steps, groups]``."""
    size = steps.choice.group_tokens
    parts = []
    for _, there in of_heads(seen, positions, wanted):
        grouped = there[:, : steps.groups * size].unflatten(1, (-1, size)).sum(2)
        parts.append(grouped.masked_fill(~steps.choosable, 0.0))
    return torch.stack(parts)


def parse(text: str) -> list[Setting]:
    """``32x26,32x13xint4`` -> columns, groups and dtype; int8 where none is said."""
    settings = []
    for part in text.split(","):
        columns, _, rest = part.partition("x")
        groups, _, dtype = rest.partition("x")
        is_number = columns.isdigit() and groups.isdigit() and int(columns) and int(groups)
        if not is_number or dtype not in ("", *SUMMARY_LEVELS):
            raise typer.BadParameter(
                f"--settings: must be COLUMNSxGROUPS, xint4 behind it or not, got {part!r}"
            )
        settings.append((int(columns), int(groups), dtype or "int8"))
    return settings


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of a document")] = 4096,
    documents: Annotated[int, typer.Option(help="how many")] = 2,
    settings: Annotated[
        str, typer.Option(help="columns, groups of 4 tokens, and xint4 for other than int8 rows")
    ] = "32x26,16x13",
    out: Annotated[bool, typer.Option(help="write bench/results/lookups_MODEL.json")] = False,
) -> None:
    console = Console(width=110)
    calibrator, samples = open_reading(model, length, documents)
    lookups = Lookups(parse(settings))
    for sample in track(samples, "reading", console=console):
        _read(calibrator, sample, lookups)
    name, found = model.resolve().name, lookups.as_dict()
    table = Table(title=f"{name}, {length:,} tokens, {documents} documents")
    for column in ("layer", "of all look-ups", "head"):
        table.add_column(column, justify="right")
    for columns, groups, dtype in lookups.settings:
        table.add_column(f"{columns} {dtype} columns, {groups} groups (oracle)", justify="right")
    for row in (*found["by_layer"], None):
        part = row or {name: [s[name] for s in found["settings"]] for name in ("found", "oracle")}
        cells = zip(part["found"], part["oracle"], strict=True)
        head = ("all", "", "") if row is None else (row["layer"], row["share"], row["head"])
        table.add_row(*map(str, head), *(f"{ours:.2f} ({best:.2f})" for ours, best in cells))
    console.print(table)
    if out:
        facts = {"machine": machine.describe("."), "model": name}
        results = facts | {"length": length, "documents": documents} | found
        console.print(f"wrote {machine.write(f'lookups_{name}', results).name}")


def _read(calibrator: Calibrator, sample: Sample, lookups: Lookups) -> None:
    calibrator.read(sample, lambda seen: lookups.add(seen, sample))


if __name__ == "__main__":
    typer.run(main)
