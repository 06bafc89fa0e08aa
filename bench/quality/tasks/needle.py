"""Needles in a haystack (RULER's four): one fact, one of many, all values of a key, two at once."""

from __future__ import annotations

import numpy as np

from bench.quality.tasks.drawn import Drawn, distractors, spread
from bench.quality.wording import ReferenceWording
from tools.reference_model.forms import Words, draw_form

ASKED_OF_MANY = 6  # single facts
FACTS, ASKED = 4, 3  # of which one answer has several


def single(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """One fact among few of its kind, at every depth."""
    return _same(rng, wording, words, density, "needle", facts=9)


def multi_key(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """One fact among many of its kind."""
    return _same(rng, wording, words, density, "multi-key", facts=32)


def _same(rng, wording, words, density, task: str, facts: int) -> Drawn:
    drawn, form = Drawn(), wording.form(rng, task)
    for depth in spread(rng, ASKED_OF_MANY):
        fact = wording.draw(rng, "same", words, form)
        drawn.asked.append(((wording.turn(fact),), drawn.lay(fact, depth)))
    for _ in range(distractors(wording.share(facts), ASKED_OF_MANY, density)):
        drawn.lay(wording.draw(rng, "same", words, form))
    return drawn


def multi_value(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """Every value of a key, each in a fact of its own."""
    return _skill(rng, wording, words, density, "values")


def multi_query(
    rng: np.random.Generator, wording: ReferenceWording, words: Words, density: float
) -> Drawn:
    """Two facts asked for in one question."""
    return _skill(rng, wording, words, density, "pair")


def _skill(rng, wording, words, density, skill: str) -> Drawn:
    drawn = Drawn()
    for depth in spread(rng, ASKED):
        task = wording.draw(rng, skill, words, draw_form(rng, "words"))
        drawn.asked.append(((wording.turn(task),), drawn.lay(task, depth)))
    for _ in range(distractors(FACTS, ASKED, density)):
        drawn.lay(wording.draw(rng, skill, words, draw_form(rng, "words")))
    return drawn
