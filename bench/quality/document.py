"""One document with the facts of every task laid in, and the samples that ask about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.quality.tasks import (
    LANGUAGE,
    LONG,
    OF_TEXT,
    QUESTIONS,
    QUOTE,
    SUMMARY,
    TASKS,
    Drawn,
    of_text,
)
from bench.quality.tasks.questions import questions
from bench.quality.text import Texts
from bench.quality.wording import ReferenceWording, Turn
from tools.reference_model.documents import cut_lines
from tools.reference_model.forms import Words
from tools.reference_model.tasks import lay_in

DENSE_TOKENS = 4096  # shorter documents have fewer distractors
CONTINUED = {LANGUAGE: 128, LONG: 1024}  # tokens of the text's own continuation
SUMMARY_TOKENS = 96
CHARACTERS_PER_TOKEN = 8  # more than any tokenizer makes of prose, so that text suffices


@dataclass(frozen=True)
class Sample:
    """What follows a document, teacher-forced.

    Parameters
    ----------
    ids
        ``[tokens]`` int64: prompts and answers of all turns.
    answers
        First and one past the last token of each answer in `ids`; at least 1, since a token is
        predicted by the one before it.
    depth
        Where in the document the last fact needed lies, 0 to 1; None: nowhere.
    to_write
        Tokens that the full cache is to write after `ids`; they become the answer.
    """

    task: str
    ids: torch.Tensor
    answers: tuple[tuple[int, int], ...]
    depth: float | None = None
    to_write: int = 0

    def written(self, tokens: torch.Tensor) -> Sample:
        """With what was written, ``[tokens]`` int64, as its answer."""
        ids = torch.cat([self.ids, tokens])
        return Sample(self.task, ids, ((len(self.ids), len(ids)),), self.depth)


@dataclass(frozen=True)
class Document:
    """`ids` ``[tokens]`` int64, and what is asked about it."""

    length: int
    number: int
    ids: torch.Tensor
    samples: tuple[Sample, ...]


class Writer:
    """Writes documents: the same seed, length and number give the same one.

    Parameters
    ----------
    tokenizer
        Of the model.
    tasks
        Names out of `TASKS` and `OF_TEXT`.
    """

    def __init__(
        self,
        tokenizer: Any,
        wording: ReferenceWording,
        texts: Texts,
        tasks: Sequence[str],
        seed: int,
    ):
        unknown = sorted(set(tasks) - set(TASKS) - set(OF_TEXT))
        if unknown or not tasks:
            raise ValueError(
                f"tasks: must be among {', '.join((*TASKS, *OF_TEXT))}, got {', '.join(unknown)}"
            )
        self.tokenizer, self.wording, self.texts = tokenizer, wording, texts
        self.tasks, self.seed = tuple(tasks), seed

    def write(self, length: int, number: int, fitted: bool = False) -> Document:
        """A document of at most `length` tokens.

        Parameters
        ----------
        fitted
            Take text that projections may be fitted to, and other facts.

        Raises
        ------
        ValueError
            When the facts leave no room for text, or the text is too short.
        """
        rng = np.random.default_rng([self.seed, length, number, int(fitted)])
        words = Words(distinct=True)
        drawn = {
            task: TASKS[task](rng, self.wording, words, length / DENSE_TOKENS)
            for task in self.tasks
            if task in TASKS
        }
        laid = [task for each in drawn.values() for task in each.laid]
        spent = sum(self._count(fact + "\n") for task in laid for fact in task.facts)
        if spent > 0.8 * length:
            raise ValueError(
                f"document: facts must leave a fifth of {length} tokens for text, took {spent}; "
                "ask for longer documents or fewer tasks"
            )
        text = self.texts.draw(rng, CHARACTERS_PER_TOKEN * length, fitted)
        # One token for what a tokenizer puts first.
        spent += 1 + self._count(self.wording.opening)
        cut = cut_lines(text, length - spent, self._count)
        depths = [depth for each in drawn.values() for depth in each.depths]
        document, placed = lay_in(rng, cut, laid, depths)
        samples = self._samples(drawn, [question.depth for question in placed])
        samples += self._of_text(rng, document, text[len(cut) :])
        # A chat template brings its own special tokens.
        first = not self.wording.opening
        ids = self.tokenizer(self.wording.opening + document, add_special_tokens=first).input_ids
        return Document(length, number, torch.tensor(ids), tuple(samples))

    def _samples(self, drawn: dict[str, Drawn], depths: list[float]) -> list[Sample]:
        samples, first = [], 0
        for task, each in drawn.items():
            for turns, laid in each.asked:
                samples.append(self._sample(task, turns, depths[first + laid]))
            first += len(each.laid)
        return samples

    def _sample(self, task: str, turns: tuple[Turn, ...], depth: float) -> Sample:
        ids: list[int] = []
        answers = []
        for number, turn in enumerate(turns):
            ids += self._encode(self.wording.put(turn, number))
            answer = self._encode(turn.answer)
            answers.append((len(ids), len(ids) + len(answer)))
            ids += answer
        return Sample(task, torch.tensor(ids), tuple(answers), depth)

    def _of_text(self, rng: np.random.Generator, document: str, rest: str) -> list[Sample]:
        samples = [
            self._continuation(task, rest, count)
            for task, count in CONTINUED.items()
            if task in self.tasks
        ]
        if QUOTE in self.tasks:
            for turn, depth in of_text.quotes(rng, self.wording, document):
                samples.append(self._sample(QUOTE, (turn,), depth))
        if QUESTIONS in self.tasks:
            for turn, depth in questions(self.wording, document):
                samples.append(self._sample(QUESTIONS, (turn,), depth))
        if SUMMARY in self.tasks:
            ids = self._encode(self.wording.put(of_text.summary(self.wording), 0))
            samples.append(Sample(SUMMARY, torch.tensor(ids), (), to_write=SUMMARY_TOKENS))
        return samples

    def _continuation(self, task: str, text: str, count: int) -> Sample:
        ids = self._encode(text[: CHARACTERS_PER_TOKEN * count])[:count]
        return Sample(task, torch.tensor(ids), ((1, len(ids)),))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _count(self, text: str) -> int:
        return len(self._encode(text))
