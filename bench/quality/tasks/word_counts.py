"""Common and frequent words: which word is listed most often in the whole document.

No part of the document holds the answer: a selection that keeps few tokens cannot give it.
"""

from __future__ import annotations

import numpy as np

from bench.quality.tasks.drawn import Drawn
from bench.quality.wording import ReferenceWording, question_task
from tools.reference_model.forms import Words
from tools.reference_model.words import NOUNS

LINES = 24
WORDS_OF_A_LINE = 4
COMMON_SHARE = 0.5  # of the places that the most frequent word has


def draw(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """Lines of listed words, of which one is far more frequent than the others."""
    common, *others = (NOUNS[i] for i in rng.choice(len(NOUNS), 1 + 2 * LINES, replace=False))
    lines = []
    for _ in range(max(4, round(LINES * min(1.0, density)))):
        line = [
            common if rng.random() < COMMON_SHARE else others[int(rng.integers(len(others)))]
            for _ in range(WORDS_OF_A_LINE)
        ]
        lines.append(f"Listed: {', '.join(line)}.")
    text = "Which word is listed most often?"
    task = question_task(tuple(lines), text, common, "words")
    drawn = Drawn()
    drawn.asked.append(((wording.turn(task),), drawn.lay(task, 1.0)))
    return drawn
