"""Training samples: real text with facts laid in, and questions at the end."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from tools.reference_model.forms import FORMS, Words
from tools.reference_model.phases import Phase
from tools.reference_model.tasks import SKILLS, Task, answer_turn, draw_task, question_prompt

# What a token belongs to; answers are told apart by skill.
KINDS = ("text", "fact", "question", "copy", *SKILLS)
WEIGHTS = np.array([0.3, 0.1, 0.1, 2.0] + [3.0] * len(SKILLS), dtype=np.float32)


@dataclass
class Batch:
    """What one step trains on, all `[batch, tokens]`."""

    ids: np.ndarray
    positions: np.ndarray
    kinds: np.ndarray  # index into KINDS
    spans: list[tuple[int, int, int]]  # row, first and one past the last token of an answer


def frequent_words(texts: list[str], count_min: int = 40) -> list[str]:
    """Lower-case words that the texts use often."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r"(?<= )[a-z]{4,10}(?=[ .,\n])", text))
    return sorted(word for word, count in counts.items() if count >= count_min)


class Sampler:
    """Draws samples from a text of tokens; the same generator gives the same samples."""

    def __init__(self, tokenizer: Tokenizer, tokens: np.ndarray, words: Words) -> None:
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.words = words
        self.newline = tokenizer.token_to_id("Ċ")
        vocabulary = tokenizer.get_vocab().items()
        self.copied = np.array(sorted(i for token, i in vocabulary if re.match("Ġ[a-z]", token)))

    def batch(self, rng: np.random.Generator, phase: Phase) -> Batch:
        """One batch of the phase's length."""
        rows, spans = [], []
        for row in range(phase.batch):
            if rng.random() < phase.copy_share:
                ids, kinds = self._copy(rng, phase.length)
            else:
                ids, kinds, found = self._document(rng, phase)
                spans += [(row, first, last) for first, last in found]
            rows.append((ids, kinds, draw_positions(rng, phase.length, phase.span)))
        ids, kinds, positions = (np.stack(column) for column in zip(*rows, strict=True))
        return Batch(ids.astype(np.int64), positions, kinds, spans)

    def text(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """A run of real text."""
        first = int(rng.integers(len(self.tokens) - length))
        return self.tokens[first : first + length].astype(np.int64)

    def _copy(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A run of random words, repeated with real text between."""
        ids, kinds = [], []
        run = rng.choice(self.copied, int(rng.integers(4, 33)))
        while sum(map(len, ids)) < length:
            gap = self.text(rng, int(rng.integers(1, 33)))
            ids += [run, gap]
            kinds += [np.where(np.arange(len(run)) < 1, 0, 3 if len(ids) > 2 else 0)]
            kinds += [np.zeros(len(gap), dtype=np.int64)]
        return np.concatenate(ids)[:length], np.concatenate(kinds)[:length]

    def _draw_tasks(self, rng: np.random.Generator, phase: Phase) -> tuple[list[Task], list[int]]:
        """Tasks that fill the phase's share of a sample, and the turns that ask for them."""
        low, high = phase.filled
        budget = phase.length * rng.uniform(low, high)
        form = FORMS[int(rng.integers(len(FORMS)))] if rng.random() < 0.5 else None
        asked_share = rng.choice([0.3, 0.7, 1.0])
        tasks: list[Task] = []
        turns: list[int] = []
        while budget > 0:
            skill = str(rng.choice(SKILLS, p=phase.shares))
            tasks.append(draw_task(rng, skill, self.words, form))
            budget -= 14 * len(tasks[-1].facts)
            if rng.random() < asked_share or not turns:
                turns.append(len(tasks) - 1)
                budget -= 22
        if rng.random() < 0.3:
            turns.append(turns[0])
        return tasks, [turns[i] for i in rng.permutation(len(turns))]

    def _document(
        self, rng: np.random.Generator, phase: Phase
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
        tasks, turns = self._draw_tasks(rng, phase)
        facts = [fact + "\n" for task in tasks for fact in task.facts]
        asked = [tasks[turn].question for turn in turns]
        prompts = [question_prompt(question) for question in asked]
        answers = [answer_turn(question) for question in asked]
        encoded = [e.ids for e in self.tokenizer.encode_batch(facts + prompts + answers)]
        laid, rest = encoded[: len(facts)], encoded[len(facts) :]
        tail, tail_kinds, spans = [], [], []
        at = 0
        for number, question in enumerate(asked):
            prompt, answer = rest[number], rest[len(asked) + number]
            tail += prompt + answer
            kind = KINDS.index(question.skill)
            tail_kinds += [2] * len(prompt) + [kind] * len(answer)
            spans.append((at + len(prompt), at + len(prompt) + len(answer)))
            at = len(tail)
        room = phase.length - at - sum(map(len, laid))
        if room < 8:
            return self._document(rng, phase)
        head, head_kinds = self._lay_in(rng, self.text(rng, room), laid, tasks)
        ids = np.concatenate([head, np.array(tail, dtype=np.int64)])
        kinds = np.concatenate([head_kinds, np.array(tail_kinds, dtype=np.int64)])
        return ids, kinds, [(len(head) + first, len(head) + last) for first, last in spans]

    def _lay_in(
        self, rng: np.random.Generator, text: np.ndarray, laid: list[list[int]], tasks: list[Task]
    ) -> tuple[np.ndarray, np.ndarray]:
        text[-1] = self.newline
        ends = np.flatnonzero(text == self.newline) + 1
        slots: list[int] = []
        for task in tasks:
            wanted = np.sort(rng.integers(0, len(text), len(task.facts)))
            slots += ends[np.searchsorted(ends, wanted, side="right")].tolist()
        order = sorted(range(len(laid)), key=lambda i: slots[i])
        ids, kinds, at = [], [], 0
        for i in order:
            ids += [text[at : slots[i]], np.array(laid[i], dtype=np.int64)]
            kinds += [np.zeros(slots[i] - at, dtype=np.int64), np.ones(len(laid[i]), np.int64)]
            at = slots[i]
        ids.append(text[at:])
        kinds.append(np.zeros(len(text) - at, dtype=np.int64))
        return np.concatenate(ids), np.concatenate(kinds)


def draw_positions(rng: np.random.Generator, length: int, span: int) -> np.ndarray:
    """Positions with up to four jumps (PoSE), within `span`, for four samples in five."""
    positions = np.arange(length, dtype=np.int64)
    if span <= length or rng.random() < 0.2:
        return positions
    jumps = int(rng.integers(1, 5))
    room = int(rng.integers(0, span - length + 1))
    cuts = np.sort(rng.integers(0, room + 1, jumps))
    for place, jump in zip(
        np.sort(rng.integers(0, length, jumps)), np.diff(cuts, prepend=0), strict=True
    ):
        positions[place:] += jump
    return positions
