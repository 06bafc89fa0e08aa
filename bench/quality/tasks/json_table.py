"""Records of a table as lists of values: many facts pulled out of the context at once.

The class of task on which choosing keys by a low rank is known to lose where needles do not.
"""

from __future__ import annotations

import numpy as np

from bench.quality.tasks.drawn import Drawn, distractors, spread
from bench.quality.wording import ReferenceWording
from tools.reference_model.forms import Words

RECORDS = 6
ASKED = 3  # samples; one asks for as many records as the wording can


def draw(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """Records all over the document; each sample begins with another one."""
    drawn = Drawn()
    tasks = [wording.draw(rng, "record", words, None) for _ in range(ASKED)]
    numbers = [drawn.lay(task, at) for task, at in zip(tasks, spread(rng, ASKED), strict=True)]
    for first, number in enumerate(numbers):
        turn = wording.records(tasks[first:] + tasks[:first])
        drawn.asked.append(((turn,), number))
    for _ in range(distractors(RECORDS, ASKED, density)):
        drawn.lay(wording.draw(rng, "record", words, None))
    return drawn
