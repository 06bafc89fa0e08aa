"""What is asked about the text itself: to go on with it, to quote it, to sum it up."""

from __future__ import annotations

from collections import Counter

import numpy as np

from bench.quality.wording import ReferenceWording, Turn

QUOTED = 4  # samples
BEGUN_WORDS, QUOTED_WORDS = 5, 8


def quotes(
    rng: np.random.Generator, wording: ReferenceWording, document: str
) -> list[tuple[Turn, float]]:
    """Lines of a document whose first words are given and whose next ones are asked for.

    Returns
    -------
    list
        A turn for each, and the depth of its line in the document, 0 to 1.
    """
    lines = document.split("\n")
    begun = [" ".join(line.split()[:BEGUN_WORDS]) for line in lines]
    times = Counter(begun)
    enough = BEGUN_WORDS + QUOTED_WORDS
    fit = [
        number
        for number, line in enumerate(lines)
        if times[begun[number]] == 1 and len(line.split()) >= enough and line[0].isalpha()
    ]
    chosen = sorted(rng.permutation(fit)[:QUOTED].tolist())
    turns = []
    for number in chosen:
        rest = " ".join(lines[number].split()[BEGUN_WORDS:enough])
        ask = f'Quote the line of the text that begins with "{begun[number]}".'
        turns.append((wording.quote(ask, begun[number], f" {rest}"), number / len(lines)))
    return turns


def summary(wording: ReferenceWording) -> Turn:
    """What the model is asked for when it sums up; what comes out, the full cache says."""
    return wording.quote("Sum up the text in a few sentences.", "", "")
