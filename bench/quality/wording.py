"""How a model is asked: the reference model in the words it was taught, others in plain English.

Facts are laid into the text as lines of their own. A turn is what is put in after the text, and
what must come out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.reference_model.forms import FORMS, Form, Words
from tools.reference_model.tasks import Question, Task, answer_turn, draw_task, question_prompt


@dataclass(frozen=True)
class Turn:
    """A prompt, and what a model that understood writes after it."""

    prompt: str
    answer: str


class ReferenceWording:
    """The forms, questions and line ends that examples/reference_model was trained on."""

    name = "reference"

    def draw(self, rng: np.random.Generator, skill: str, words: Words, form: Form | None) -> Task:
        """Facts and a question; skills as in `tools.reference_model.tasks`."""
        return draw_task(rng, skill, words, form)

    def turn(self, task: Task) -> Turn:
        return Turn(question_prompt(task.question), answer_turn(task.question))

    def records(self, tasks: list[Task]) -> Turn:
        """All of these records at once: it was taught one at a time, so the first is asked."""
        return self.turn(tasks[0])


class PlainWording(ReferenceWording):
    """Plain English for any model: the answer is begun for it, so that its form is fixed."""

    name = "plain"

    def turn(self, task: Task) -> Turn:
        question, (begun, rest) = task.question, _begin_answer(task)
        return Turn(f"\nQuestion: {question.text}\nAnswer: {begun}".rstrip(), f" {rest}")

    def records(self, tasks: list[Task]) -> Turn:
        keys = [task.question.key for task in tasks]
        text = f"Give the records {', '.join(keys)}, each as a list of its fields."
        rest = "; ".join(task.question.answer for task in tasks).removeprefix(f"{keys[0]} =")
        return Turn(f"\nQuestion: {text}\nAnswer: {keys[0]} =", rest)


def question_task(facts: tuple[str, ...], text: str, answer: str, skill: str) -> Task:
    """A task of a kind that `draw_task` does not know."""
    return Task(facts, Question(text, answer, skill))


def choose_form(rng: np.random.Generator, sort: str | None = None) -> Form:
    """One kind of fact, whose values are of this sort."""
    forms = [form for form in FORMS if sort is None or form.sort == sort]
    return forms[int(rng.integers(len(forms)))]


def _begin_answer(task: Task) -> tuple[str, str]:
    """What is begun for the model, and what it must write."""
    skill, answer = task.question.skill, task.question.answer
    if skill == "same":
        fact = task.facts[-1]
        return fact[: fact.rindex(f" {answer}")], answer
    if skill in ("list", "values", "pair"):
        mark = ":" if skill == "pair" else " ="
        name, rest = answer.split(f"{mark} ", 1)
        return name + mark, rest
    if skill == "hop":
        return "Following the lines,", answer
    return "", answer


WORDINGS = {wording.name: wording for wording in (ReferenceWording(), PlainWording())}
