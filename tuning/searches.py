"""Text with facts laid in and questions for them, with the place of each fact and each answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvswap_torch.errors import ConfigError
from kvswap_torch.tuning import documents
from kvswap_torch.tuning.samples import Fact, FactMaker, Sample

LENGTHS = (2048, 4096)
COUNT = 8
FACTS = 12  # of a sample, all of which are asked for
ANSWER = "{a}"


@dataclass(frozen=True)
class Search:
    """A fact of a sample and the answer that it gives; ends are exclusive, all in tokens."""

    fact_begin: int
    fact_end: int
    answer_begin: int
    answer_end: int


@dataclass(frozen=True)
class SearchSample(Sample):
    """A `Sample` whose focus is what is asked of it."""

    searches: tuple[Search, ...] = ()


def search_samples(
    tokenizer: Any,
    texts: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    count: int = COUNT,
    seed: int = 0,
) -> list[SearchSample]:
    """Samples of at most so many tokens, `lengths` taken in turn.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    texts
        That facts are laid into; None: what comes along.
    lengths, count, seed
        Tokens of a sample at most; how many there are, no two of which have the same facts; what
        is drawn follows from the seed.

    Raises
    ------
    ConfigError
        Where there is too little text.
    """
    maker = _Maker(tokenizer, list(texts or documents.shipped_texts()))
    facts = FactMaker(random.Random(f"{seed} facts"))
    return [
        maker.make(random.Random(f"{seed} {number}"), lengths[number % len(lengths)], number, facts)
        for number in range(count)
    ]


class _Maker:
    def __init__(self, tokenizer: Any, texts: list[str]):
        self._tokenizer = tokenizer
        self._texts = texts
        self._start = documents.start_tokens(tokenizer)

    def make(self, rng: random.Random, length: int, number: int, facts: FactMaker) -> SearchSample:
        told = facts.draw(FACTS)
        turns = self._turns(rng.sample(told, len(told)), documents.TURNS, number)
        ids = list(self._start)
        asked = sum(len(part) for _, *parts in turns for part in parts)
        places = self._read(rng, ids, told, length - asked - len(ids))
        text = len(ids) - sum(end - begin for begin, end in places.values())
        if text < documents.TEXT_MIN:
            raise ConfigError(
                f"calibration text: must have at least {documents.TEXT_MIN} tokens in a sample of "
                f"{length}, got {text}; give a longer text, or a model of longer ones"
            )
        focus, searches = len(ids), []
        for fact, before, answer, after in turns:
            ids += before
            searches.append(Search(*places[fact], len(ids), len(ids) + len(answer)))
            ids += answer + after
        return SearchSample(torch.tensor(ids, dtype=torch.int64), focus, tuple(searches))

    def _turns(self, asked: list[Fact], forms: Sequence[str], number: int) -> list[tuple[Any, ...]]:
        """Each fact with the tokens before its answer, of it and after."""
        form = forms[number % len(forms)]
        turns = []
        for fact in asked:
            before, after = form.replace("{q}", fact.question).split(ANSWER)
            question = before.rstrip(" ")  # a space belongs to the word behind it
            answer = before[len(question) :] + fact.answer
            turns.append((fact, *map(self._encode, (question, answer, after))))
        return turns

    def _read(
        self, rng: random.Random, ids: list[int], facts: list[Fact], room: int
    ) -> dict[Fact, tuple[int, int]]:
        """Appends lines with the facts among them, evenly; returns where these stand."""
        lines = documents.draw_lines(rng, self._texts, documents.CHARACTERS_PER_TOKEN * room)
        pieces = [self._encode(fact.text + "\n") for fact in facts]
        room -= sum(map(len, pieces))
        text, gaps = iter(lines), len(facts) + 1
        places = {}
        for number, (fact, piece) in enumerate(zip(facts, pieces, strict=True)):
            self._fill(ids, text, room * (number + 1) // gaps - room * number // gaps)
            places[fact] = (len(ids), len(ids) + len(piece))
            ids += piece
        self._fill(ids, text, room - room * len(facts) // gaps)
        return places

    def _fill(self, ids: list[int], lines: Iterator[str], room: int) -> None:
        """Whole lines while there is room."""
        for line in lines:
            tokens = self._encode(line.removesuffix("\n") + "\n")
            if len(tokens) > room:
                return
            ids += tokens
            room -= len(tokens)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)
