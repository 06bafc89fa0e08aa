"""What a plan will cost: cells that are missing, by the seconds of those that the journal has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.quality.methods import FULL
from bench.quality.plan import Stretch
from kvswap_torch.compare.journal import Journal

Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Cost:
    """Of a plan.

    Attributes
    ----------
    cells, left
        Documents times methods, in all and that the journal does not have.
    documents
        That something is left of: the full cache reads each again.
    seconds
        About how long what is left takes; None: the journal has nothing to judge by.
    """

    cells: int
    left: int
    documents: int
    seconds: float | None

    def line(self) -> str:
        """In words."""
        done = (
            f"{self.cells:,} cells (a document read by a method), {self.cells - self.left:,} done"
        )
        if not self.left:
            return f"{done}: nothing is left"
        left = f"{done}; to come: {self.left:,} cells of {self.documents:,} documents"
        if self.seconds is None:
            return f"{left}, for how long is known after the first"
        return f"{left}, about {_time(self.seconds)}"


def cost_of(plan: Sequence[Stretch], journal: Journal) -> Cost:
    """By the journal's lines; older ones have processor seconds alone, which are more."""
    lines = [line for line in journal.lines() if "impossible" not in line]
    cells = left = documents = 0
    seconds: float | None = 0.0
    for stretch in plan:
        for number in range(stretch.documents):
            wanted = [
                method
                for method in stretch.methods
                if not journal.has(stretch.length, number, method)
            ]
            cells, left = cells + len(stretch.methods), left + len(wanted)
            if not wanted:
                continue
            documents += 1
            for method in dict.fromkeys((FULL, *wanted)):
                one = seconds_of(lines, stretch.length, method)
                seconds = None if one is None or seconds is None else seconds + one
    return Cost(cells, left, documents, seconds)


def seconds_of(lines: Lines, length: int, method: str) -> float | None:
    """Of a cell: a mean over those of its method and length, else of what is nearest.

    A method without lines takes what others take beside the full cache; a length without lines
    takes its share of the nearest one, and more for attention.
    """
    own = [line for line in lines if line["method"] == method]
    if not own:
        own = [line for line in lines if line["method"] != FULL] if method != FULL else []
    if not own:
        return None
    nearest = min({line["length"] for line in own}, key=lambda other: abs(other - length))
    found = [_seconds(line) for line in own if line["length"] == nearest]
    return sum(found) / len(found) * length / nearest


def first_cells(plan: Sequence[Stretch]) -> list[Stretch]:
    """The smallest part of a plan by which the rest can be judged: one document, two methods."""
    return [Stretch(plan[0].length, 1, plan[0].methods[:2])]


def _seconds(line: dict[str, Any]) -> float:
    return float(line.get("seconds", line["cpu_seconds"]))


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
