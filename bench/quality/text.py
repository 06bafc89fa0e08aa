"""Where the documents' text comes from, and which part of it projections may be fitted to."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np

HELD_OUT = "held-out"
CODE = "code"
CODE_CHARACTERS_MIN = 20_000  # of a module
FITTED_PART = 1 / 3  # of a file, where that is all there is


class Texts:
    """Runs of real text that begin at a line; the same seed gives the same run.

    Parameters
    ----------
    source
        ``held-out``: the manuals that the reference model was not trained on (fitting takes those
        that it was). ``code``: modules of this Python's own library. Otherwise a text
        file, whose first third is for fitting.
    """

    def __init__(self, source: str = HELD_OUT):
        self.source = source

    def draw(self, rng: np.random.Generator, characters: int, fitted: bool = False) -> str:
        """A run of so many characters.

        Raises
        ------
        ValueError
            When the source is shorter than that.
        """
        if self.source in (HELD_OUT, CODE):
            bodies = _manuals(fitted) if self.source == HELD_OUT else _modules(fitted)
            joined = "\n".join(_some(rng, bodies, 2 * characters))
        else:
            joined = _file_part(self.source, fitted)
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
def _manuals(fitted: bool) -> tuple[str, ...]:
    from tools.reference_model.texts import load_texts

    return tuple(text.body for text in load_texts() if text.held_out != fitted)


@cache
def _modules(fitted: bool) -> tuple[str, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    bodies = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    # Every third is for fitting, as of a file.
    return tuple(
        body
        for number, body in enumerate(body for body in bodies if len(body) >= CODE_CHARACTERS_MIN)
        if (number % 3 == 0) == fitted
    )


@cache
def _file_part(source: str, fitted: bool) -> str:
    text = Path(source).read_text(encoding="utf-8")
    cut = text.find("\n", int(FITTED_PART * len(text))) + 1
    return text[:cut] if fitted else text[cut:]
