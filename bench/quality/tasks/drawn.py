"""What a task asks for and what must stand in the document."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bench.quality.wording import Turn
from tools.reference_model.tasks import Task


@dataclass
class Drawn:
    """Tasks to lay in, where, and what is asked.

    Parameters
    ----------
    laid
        Facts of each, in the order in which they must stand.
    depths
        Where the last fact of each goes, 0 the beginning and 1 the end; None: anywhere.
    asked
        Samples: turns that follow one another, and the number in `laid` that the sample's depth is
        that of.
    """

    laid: list[Task] = field(default_factory=list)
    depths: list[float | None] = field(default_factory=list)
    asked: list[tuple[tuple[Turn, ...], int]] = field(default_factory=list)

    def lay(self, task: Task, depth: float | None = None) -> int:
        """Adds facts; returns their number."""
        self.laid.append(task)
        self.depths.append(depth)
        return len(self.laid) - 1


def spread(rng: np.random.Generator, count: int) -> list[float]:
    """Depths from the beginning to the end, one at random in each of `count` equal parts."""
    return [float(depth) for depth in (np.arange(count) + rng.random(count)) / count]


def distractors(facts: int, asked: int, density: float) -> int:
    """Facts of the same kind that nobody asks for."""
    return max(0, round((facts - asked) * min(1.0, density)))
