"""One document with the facts of every task laid in, and the samples that ask about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.quality.tasks import LANGUAGE, TASKS, Drawn
from bench.quality.text import Texts
from bench.quality.wording import ReferenceWording, Turn
from tools.reference_model.documents import cut_lines
from tools.reference_model.forms import Words
from tools.reference_model.tasks import lay_in

DENSE_TOKENS = 4096  # shorter documents have fewer distractors
CONTINUED_TOKENS = 128  # of the text's own continuation
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
    """

    task: str
    ids: torch.Tensor
    answers: tuple[tuple[int, int], ...]
    depth: float | None = None


@dataclass(frozen=True)
class Document:
    """`ids` ``[tokens]`` int64, and what is asked about it."""

    length: int
    number: int
    ids: torch.Tensor
    samples: tuple[Sample, ...]

    @property
    def longest(self) -> int:
        """Tokens with the longest sample that follows."""
        return len(self.ids) + max(len(sample.ids) for sample in self.samples)


class Writer:
    """Writes documents: the same seed, length and number give the same one.

    Parameters
    ----------
    tokenizer
        Of the model.
    tasks
        Names out of `TASKS`, and ``language``.
    """

    def __init__(
        self,
        tokenizer: Any,
        wording: ReferenceWording,
        texts: Texts,
        tasks: Sequence[str],
        seed: int,
    ):
        unknown = sorted(set(tasks) - set(TASKS) - {LANGUAGE})
        if unknown or not tasks:
            raise ValueError(
                f"tasks: must be among {', '.join((*TASKS, LANGUAGE))}, got {', '.join(unknown)}"
            )
        self.tokenizer, self.wording, self.texts = tokenizer, wording, texts
        self.tasks, self.seed = tuple(tasks), seed

    def write(self, length: int, number: int) -> Document:
        """A document of at most `length` tokens.

        Raises
        ------
        ValueError
            When the facts leave no room for text, or the text is too short.
        """
        rng = np.random.default_rng([self.seed, length, number, 0])
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
        text = self.texts.draw(rng, CHARACTERS_PER_TOKEN * length)
        # One token for what a tokenizer puts first.
        spent += 1 + self._count(self.wording.opening)
        cut = cut_lines(text, length - spent, self._count)
        depths = [depth for each in drawn.values() for depth in each.depths]
        document, placed = lay_in(rng, cut, laid, depths)
        samples = self._samples(drawn, [question.depth for question in placed])
        if LANGUAGE in self.tasks:
            samples.append(self._continuation(text[len(cut) :]))
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

    def _continuation(self, text: str) -> Sample:
        ids = self._encode(text[: CHARACTERS_PER_TOKEN * CONTINUED_TOKENS])[:CONTINUED_TOKENS]
        return Sample(LANGUAGE, torch.tensor(ids), ((1, len(ids)),))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _count(self, text: str) -> int:
        return len(self._encode(text))
