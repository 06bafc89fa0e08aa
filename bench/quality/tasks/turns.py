"""Several turns over one document: each question sees the questions and answers before it."""

from __future__ import annotations

import numpy as np

from bench.quality.tasks.drawn import Drawn, distractors, spread
from bench.quality.wording import ReferenceWording
from tools.reference_model.forms import Words

FACTS = 9
TURNS = 4


def draw(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """One conversation, about facts in a drawn order."""
    drawn, form = Drawn(), wording.form(rng, "turns")
    tasks = [wording.draw(rng, "same", words, form) for _ in range(TURNS)]
    numbers = [drawn.lay(task, at) for task, at in zip(tasks, spread(rng, TURNS), strict=True)]
    order = [int(i) for i in rng.permutation(TURNS)]
    drawn.asked.append((tuple(wording.turn(tasks[i]) for i in order), numbers[order[-1]]))
    for _ in range(distractors(wording.share(FACTS), TURNS, density)):
        drawn.lay(wording.draw(rng, "same", words, form))
    return drawn
