"""Where the documents' text comes from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

HELD_OUT = "held-out"
LEFT_OUT = 1 / 3  # of a file, its first part: free for a calibration


class Texts:
    """Runs of real text that begin at a line; the same seed gives the same run.

    Parameters
    ----------
    source
        ``held-out``: the manuals that the reference model was not trained on. Otherwise a text
        file, whose first third is left out, so that a calibration may use it.
    """

    def __init__(self, source: str = HELD_OUT):
        self.source = source

    def draw(self, rng: np.random.Generator, characters: int) -> str:
        """A run of so many characters.

        Raises
        ------
        ValueError
            When the source is shorter than that.
        """
        if self.source == HELD_OUT:
            joined = "\n".join(_some(rng, _manuals(), 2 * characters))
        else:
            joined = _file_part(self.source)
        room = len(joined) - characters
        if room < 0:
            raise ValueError(
                f"text: {self.source} must have at least {characters} characters for a document "
                f"of this length, got {len(joined)}; ask for fewer tokens or give a longer text"
            )
        first = int(rng.integers(room + 1))
        start = joined.find("\n", first) + 1
        return joined[start if start + characters <= len(joined) else first :][:characters]


def _some(rng: np.random.Generator, bodies: tuple[str, ...], characters: int) -> list[str]:
    drawn, length = [], 0
    for i in rng.permutation(len(bodies)):
        drawn.append(bodies[i])
        length += len(bodies[i])
        if length > characters:
            break
    return drawn


@cache
def _manuals() -> tuple[str, ...]:
    from tools.reference_model.texts import load_texts

    return tuple(text.body for text in load_texts() if text.held_out)


@cache
def _file_part(source: str) -> str:
    text = Path(source).read_text(encoding="utf-8")
    return text[text.find("\n", int(LEFT_OUT * len(text))) + 1 :]
