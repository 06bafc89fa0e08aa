"""Variable tracking: a number is given to one name, that name to another, and the other asked."""

from __future__ import annotations

import numpy as np

from bench.quality.tasks.drawn import Drawn, distractors, spread
from bench.quality.wording import ReferenceWording
from tools.reference_model.forms import Words

CHAINS = 6
ASKED = 3


def draw(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """Chains of two; the second assignment stands at the depth, the first anywhere before it."""
    drawn = Drawn()
    for depth in spread(rng, ASKED):
        task = wording.draw(rng, "hop", words, None)
        drawn.asked.append(((wording.turn(task),), drawn.lay(task, depth)))
    for _ in range(distractors(CHAINS, ASKED, density)):
        drawn.lay(wording.draw(rng, "hop", words, None))
    return drawn
