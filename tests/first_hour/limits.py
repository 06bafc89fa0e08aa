"""How soon each user must come to the first right answer, on two idle cores."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.first_hour.typist import Step


@dataclass(frozen=True)
class Limit:
    """Seconds, and the command whose output is the first right answer.

    Parameters
    ----------
    until
        A pattern of that command, found anywhere in it.
    """

    seconds: int
    until: str

    def reached(self, steps: Iterable[Step]) -> Step:
        """What it took from the first command to the end of that one.

        Raises
        ------
        ValueError
            No such command was typed.
        """
        seconds = processor_seconds = 0.0
        for step in steps:
            seconds += step.seconds
            processor_seconds += step.processor_seconds
            if re.search(self.until, step.typed):
                return Step(step.typed, seconds, processor_seconds)
        raise ValueError(f"limit: a command with {self.until!r} must be typed, was not")


LIMITS = {
    "clone": Limit(600, "make demo"),
    "laptop": Limit(120, "kvswap ask"),
    "researcher": Limit(900, "kvswap compare(?!.*--dry-run)"),
    "cpp": Limit(600, r"build/app \."),
    "operator": Limit(300, "chat/completions"),
    "few-bits": Limit(600, "kvswap generate"),
    "gguf": Limit(600, "kvswap generate"),
}
