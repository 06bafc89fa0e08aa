"""How a model is asked: the reference model in the words it was taught, others in plain English.

Facts are laid into the text as lines of their own. A turn is what is put in after the text, and
what must come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvswap_torch.cli.prompt import make_prompt
from tools.real_model.facts import NUMBERED, NumberedForm
from tools.reference_model.forms import Form, Words, draw_form
from tools.reference_model.tasks import Question, Task, answer_turn, draw_task, question_prompt


@dataclass(frozen=True)
class Turn:
    """A prompt, and what a model that understood writes after it.

    Parameters
    ----------
    begun
        What of the answer is written for the model after the prompt, so that its form is fixed.
    """

    prompt: str
    answer: str
    begun: str = ""


class ReferenceWording:
    """The forms, questions and line ends that examples/reference_model was trained on."""

    name = "reference"
    opening = ""  # before the document

    def put(self, turn: Turn, number: int) -> str:
        """What stands before the answer of turn `number`, which counts from 0."""
        return f"{turn.prompt} {turn.begun}" if turn.begun else turn.prompt

    def draw(self, rng: np.random.Generator, skill: str, words: Words, form: Form | None) -> Task:
        """Facts and a question; skills as in `tools.reference_model.tasks`."""
        return draw_task(rng, skill, words, form)

    def form(self, rng: np.random.Generator, task: str) -> Form:
        """The kind of fact that a task asks for, all of one."""
        return draw_form(rng, None if task == "turns" else "words")

    def share(self, facts: int) -> int:
        """How many of so many facts of a kind this model can be trusted to tell apart."""
        return facts

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
        return Turn(self.ask(question.text), f" {rest}", begun)

    def records(self, tasks: list[Task]) -> Turn:
        keys = [task.question.key for task in tasks]
        text = f"Give the records {', '.join(keys)}, each as a list of its fields."
        rest = "; ".join(task.question.answer for task in tasks).removeprefix(f"{keys[0]} =")
        return Turn(self.ask(text), rest, f"{keys[0]} =")

    def ask(self, text: str) -> str:
        """A question as it is put after the document."""
        return f"\nQuestion: {text}\nAnswer:"


class ChatWording(PlainWording):
    """Plain English through a model's own chat template; single facts are numbers of six digits.

    Parameters
    ----------
    tokenizer
        Of the model.

    Raises
    ------
    ValueError
        When the model's folder has no chat template.
    """

    name = "chat"

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "wording: chat needs a chat template, and the model's folder has none; use plain"
            )
        self._prompt = make_prompt("auto", tokenizer)
        self.opening = self._prompt.opening

    def form(self, rng: np.random.Generator, task: str) -> Form:
        return NUMBERED[task]

    def draw(self, rng: np.random.Generator, skill: str, words: Words, form: Form | None) -> Task:
        if skill == "same" and isinstance(form, NumberedForm):
            return form.draw(rng, words)
        return super().draw(rng, skill, words, form)

    def share(self, facts: int) -> int:
        return facts // 3

    def ask(self, text: str) -> str:
        return text

    def put(self, turn: Turn, number: int) -> str:
        text = self._prompt.first if number == 0 else self._prompt.following
        return text.replace("{question}", turn.prompt) + turn.begun


def question_task(facts: tuple[str, ...], text: str, answer: str, skill: str) -> Task:
    """A task of a kind that `draw_task` does not know."""
    return Task(facts, Question(text, answer, skill))


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


WORDINGS = ("reference", "plain", "chat")


def wording_for(name: str, tokenizer: Any) -> ReferenceWording:
    """The wording of this name for a model with this tokenizer.

    Raises
    ------
    ValueError
        For an unknown name, or a chat without a template.
    """
    if name not in WORDINGS:
        raise ValueError(f"wording: must be auto or one of {', '.join(WORDINGS)}, got {name!r}")
    if name == "chat":
        return ChatWording(tokenizer)
    return PlainWording() if name == "plain" else ReferenceWording()
