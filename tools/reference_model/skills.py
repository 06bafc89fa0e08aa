"""The skills a model is measured by, and the documents that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.reference_model.documents import cut_lines
from tools.reference_model.forms import Words, draw_form
from tools.reference_model.tasks import Question, Task, draw_task, lay_in


@dataclass(frozen=True)
class Skill:
    """One line of the table."""

    name: str
    task: str  # what `draw_task` draws
    facts: int  # of the same form in the document, distractors included
    asked: int  # questions per document
    mark: float | None = None  # must hold to 16K; None: as far as it comes
    sort: str | None = None  # of the value
    turns: bool = False  # each question sees the turns before


SKILLS = (
    Skill("single needle, 8 distractors", "same", 9, 6, 0.98, "words"),
    Skill("in other words", "other", 9, 6, 0.95),
    Skill("multi-key, 32 facts", "same", 32, 6, 0.95, "words"),
    Skill("numbers", "same", 9, 4, 0.95, "number"),
    Skill("several turns", "same", 9, 4, 0.95, turns=True),
    Skill("list all values", "values", 4, 3),
    Skill("list numbered items", "list", 4, 3),
    Skill("two questions in one", "pair", 4, 3),
    Skill("two hops", "hop", 6, 3),
    Skill("record to a list", "record", 6, 3),
)


@dataclass(frozen=True)
class Asked:
    """A question of a skill."""

    skill: Skill
    question: Question


def draw_groups(rng: np.random.Generator, skills: tuple[Skill, ...]) -> list[tuple[Skill, Task]]:
    """Tasks of every skill; the first `asked` of each are asked."""
    words = Words(distinct=True)
    drawn = []
    for skill in skills:
        form = draw_form(rng, skill.sort)
        drawn += [(skill, draw_task(rng, skill.task, words, form)) for _ in range(skill.facts)]
    return drawn


def make_sample(
    seed: int,
    text: str,
    tokens: int,
    count_tokens: Callable[[str], int],
    skills: tuple[Skill, ...] = SKILLS,
) -> tuple[str, list[Asked]]:
    """A document with facts of every skill, and the questions about them."""
    rng = np.random.default_rng(seed)
    drawn = draw_groups(rng, skills)
    spent = sum(count_tokens(fact + "\n") for _, task in drawn for fact in task.facts)
    document, questions = lay_in(
        rng, cut_lines(text, tokens - spent, count_tokens), [task for _, task in drawn]
    )
    asked, counts = [], dict.fromkeys(skills, 0)
    for (skill, _), question in zip(drawn, questions, strict=True):
        counts[skill] += 1
        if counts[skill] <= skill.asked:
            asked.append(Asked(skill, question))
    return document, asked
