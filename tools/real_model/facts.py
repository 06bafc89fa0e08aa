"""Facts that a small chat model can be asked for: numbers of six digits under names it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.reference_model.documents import cut_lines, load_source
from tools.reference_model.forms import Form, Words
from tools.reference_model.tasks import Question, Task, lay_in

ASKED = 6  # of a document


@dataclass(frozen=True)
class NumberedForm(Form):
    """A kind of fact about one of these names; the value is a number of six digits."""

    names: tuple[str, ...] = ()

    def draw(self, rng: np.random.Generator, words: Words) -> Task:
        """A fact about a name that was not drawn yet, and its question."""
        names = [name for name in self.names if name not in words.drawn]
        name, value = names[int(rng.integers(len(names)))], str(rng.integers(10**5, 10**6))
        words.drawn.add(name)
        question = Question(self.same[0].format(k=name), value, "same", name)
        return Task((self.facts[0].format(k=name, v=value),), question)


def _numbered(name: str, thing: str, names: str) -> NumberedForm:
    fact, question = f"The {thing} of {{k}} is {{v}}.", f"What is the {thing} of {{k}}?"
    return NumberedForm(name, "number", (fact,), (question,), (), tuple(names.split()))


# Each task has a kind of its own, so that one task's facts do not stand in another's way.
NUMBERED = {
    "needle": _numbered(
        "access",
        "access number",
        "Lisbon Oslo Nairobi Quito Hanoi Dublin Warsaw Lima Tunis Havana Athens Seoul Cairo Riga",
    ),
    "multi-key": _numbered(
        "badge",
        "badge number",
        "Alice Bruno Clara David Elena Felix Grace Hector Irene Jonas Karin Lukas Maria Nils Olga "
        "Peter Rosa Simon Tessa Ulrich Vera Walter Yvonne Zeno Anton Bella Cyril Doris Edgar Fiona "
        "Gustav Hanna Igor Julia Kevin Laura Martin Nadia",
    ),
    "turns": _numbered(
        "serial",
        "serial number",
        "Mercury Venus Mars Jupiter Saturn Neptune Pluto Titan Europa Ganymede Callisto Triton",
    ),
}


def numbered_document(
    source: str, seed: int, tokens: int, count_tokens: Callable[[str], int]
) -> tuple[str, list[Question]]:
    """A real document of at most `tokens` tokens with numbers laid in all over it.

    Returns
    -------
    tuple of str and list of Question
        The document, ending with a newline, and a question for each number.
    """
    rng, words = np.random.default_rng(seed), Words(distinct=True)
    tasks = [NUMBERED["needle"].draw(rng, words) for _ in range(ASKED)]
    spent = sum(count_tokens(fact + "\n") for task in tasks for fact in task.facts)
    depths = [float(depth) for depth in (rng.permutation(ASKED) + rng.random(ASKED)) / ASKED]
    text = cut_lines(load_source(source), tokens - spent, count_tokens)
    return lay_in(rng, text, tasks, depths)
