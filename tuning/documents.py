"""What a model is calibrated on when nobody says otherwise, and from a user's own text.

Long text with facts laid in, then turns that ask for them: directions of the keys that only
retrieval uses are not seen in plain text. The text that comes along is in `text/`, with its
licence; it serves any model and tokenizer.
"""

from __future__ import annotations

import bisect
import itertools
import lzma
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.tuning.samples import Fact, FactMaker, Sample

TEXT = Path(__file__).resolve().parent / "text" / "manual.txt.xz"
DOCUMENT_END = "\f\n"

COUNT = 6  # samples to fit; half as many again are held out
LENGTHS = (4096, 8192)
LENGTH_MIN = 256
TEXT_MIN = 128  # tokens of text alone
TURNS_SHARE = 4  # one token in four, and at most
TURNS_MAX = 1024
CHARACTERS_PER_TOKEN = 7  # more than any text has: what is too much is cut
TOKENS_PER_FACT = 128  # of a sample: facts take about a sixth of it
FACTS_MIN = 8
SLACKS = (1.0, 1.005, 1.02, 1.1, 2.0)  # tried in turn until a text fits
PIECE_MAX = 400  # characters; a longer line is taken apart
QUOTE_EVERY = 6  # turns; one of them asks how a sentence of the text goes on
QUOTE_WORDS = (5, 12)  # shown, and asked for

# How a question and its answer are written; every sample has one of these.
TURNS = (
    "Question: {q}\nAnswer: {a}\n",
    "Q: {q}\nA: {a}\n\n",
    "User: {q}\nAssistant: {a}\n",
    "### Question\n{q}\n### Answer\n{a}\n\n",
    "{q}\n{a}\n\n",
    "- {q} {a}\n",
)


def default_samples(
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    count: int = COUNT,
    seed: int = 0,
) -> tuple[list[Sample], list[Sample]]:
    """Samples from the text that comes along; (to fit, held out).

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    lengths
        Tokens of the samples at most, taken in turn.
    count
        Samples to fit; half as many, at least one a length, are held out. They share neither
        documents nor facts.

    Raises
    ------
    ConfigError
        When a length or the count is too small.
    """
    documents = shipped_texts()
    return _samples(
        tokenizer,
        fitted=[text for number, text in enumerate(documents) if number % 3],
        held_out=[text for number, text in enumerate(documents) if number % 3 == 0],
        plan=_Plan(tuple(lengths), count, seed),
    )


def samples_from_files(
    tokenizer: Any,
    paths: Sequence[str | Path],
    lengths: Sequence[int] = LENGTHS,
    seed: int = 0,
    count: int = COUNT,
) -> tuple[list[Sample], list[Sample]]:
    """The same from a user's own text: the first two thirds of each file are fitted to.

    Where there is less text than a sample should have, the sample is shorter, and a `UserWarning`
    says so.

    Raises
    ------
    StorageError
        When a file cannot be read.
    ConfigError
        When one is not UTF-8, or when all together are too short to be of use.
    """
    if not paths:
        raise ConfigError("calibration text: must be at least one file, got none")
    fitted, held_out = [], []
    for path in paths:
        lines = _pieces(read_text(path))
        third = -(-2 * len(lines) // 3)
        fitted.append("".join(lines[:third]))
        held_out.append("".join(lines[third:]))
    return _samples(tokenizer, fitted, held_out, _Plan(tuple(lengths), count, seed))


@cache
def shipped_texts() -> tuple[str, ...]:
    """The documents that come along."""
    text = lzma.decompress(TEXT.read_bytes()).decode("utf-8")
    return tuple(text.split(DOCUMENT_END))


def read_text(path: str | Path) -> str:
    """A user's text: `StorageError` where it cannot be read, `ConfigError` where it is no UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(
            error.errno, f"calibration text: '{path}' must be readable, got {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"calibration text: '{path}' must be UTF-8 text, got {error}") from error


@dataclass(frozen=True)
class _Plan:
    lengths: tuple[int, ...]
    count: int
    seed: int

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < LENGTH_MIN:
            raise ConfigError(
                f"calibration: every length must be at least {LENGTH_MIN} tokens, got "
                f"{list(self.lengths)}"
            )
        if self.count < 1:
            raise ConfigError(f"calibration: count must be at least 1, got {self.count}")


def _samples(
    tokenizer: Any, fitted: list[str], held_out: list[str], plan: _Plan
) -> tuple[list[Sample], list[Sample]]:
    maker = _SampleMaker(tokenizer)
    parts = (
        (fitted, plan.count, 2 * plan.seed),
        (held_out, max(len(plan.lengths), plan.count // 2), 2 * plan.seed + 1),
    )
    made = tuple(
        [
            # The longest first: if there is one sample only, it is a long one.
            maker.make(texts, sorted(plan.lengths)[-1 - number % len(plan.lengths)], seed, number)
            for number in range(count)
        ]
        for texts, count, seed in parts
    )
    if maker.shortest is not None:
        tokens, asked = maker.shortest
        warnings.warn(
            f"calibration text: a sample should have {asked} tokens, but there is text for "
            f"{tokens} only; give more text, or expect recall in longer contexts to be lower",
            UserWarning,
            stacklevel=3,
        )
    return made


class _SampleMaker:
    """Puts samples together, and remembers where the text was too short."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._start = start_tokens(tokenizer)
        self.shortest: tuple[int, int] | None = None

    def make(self, texts: list[str], length: int, seed: int, number: int) -> Sample:
        """At most `length` tokens: text with facts, then turns, of which the focus is made."""
        rng = random.Random(f"{seed} {number}")
        turns_room = min(length // TURNS_SHARE, TURNS_MAX)
        room = length - turns_room - len(self._start)
        facts = self._facts(rng, max(FACTS_MIN, length // TOKENS_PER_FACT), room // 2)
        depths = sorted(rng.random() for _ in facts)
        lines = draw_lines(rng, texts, CHARACTERS_PER_TOKEN * length)
        if (tokens := len(self._encode("".join(lines)))) < TEXT_MIN:
            raise ConfigError(
                f"calibration text: must have at least {TEXT_MIN} tokens in its first two thirds "
                f"and in the rest, got {tokens}; give a longer text"
            )
        texts_of_facts = [fact.text for fact in facts]
        kept = self._fit(lines, texts_of_facts, depths, room)
        read = self._start + self._encode(lay_in(lines[:kept], texts_of_facts, depths))
        turns = self._turns(rng, facts, lines[:kept], TURNS[number % len(TURNS)], turns_room)
        if kept == len(lines) and len(read) < 0.9 * room:
            total = len(read) + len(turns)
            self.shortest = min(self.shortest or (total, length), (total, length))
        return Sample(torch.tensor(read + turns, dtype=torch.int64), len(read))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _facts(self, rng: random.Random, count: int, room: int) -> list[Fact]:
        """So many, but no more than there is room for, and one at least."""
        facts = FactMaker(rng).draw(count)
        for kept, fact in enumerate(facts):
            room -= len(self._encode(fact.text + "\n"))
            if room < 0:
                return facts[: max(kept, 1)]
        return facts

    def _fit(self, lines: list[str], facts: list[str], depths: list[float], room: int) -> int:
        """About the most lines that fit with all facts, and no more than that."""
        counts = [len(ids) for ids in self._tokenizer(lines, add_special_tokens=False).input_ids]
        ends = list(itertools.accumulate(counts))
        told = len(self._encode(lay_in([], facts, depths)))

        def guess(scale: float) -> tuple[int, int]:
            """(lines, tokens with the facts) where joined lines have `scale` of their tokens."""
            kept = bisect.bisect_right(ends, (room - told) / scale)
            return kept, len(self._encode(lay_in(lines[:kept], facts, depths)))

        kept, tokens = guess(1.0)
        if kept == 0:
            return 0
        scale = max(tokens - told, 1) / ends[kept - 1]
        for slack in SLACKS:
            kept, tokens = guess(scale * slack)
            if tokens <= room:
                return kept
        return 0

    def _turns(
        self, rng: random.Random, facts: list[Fact], lines: list[str], form: str, room: int
    ) -> list[int]:
        """As many turns as there is room for, at least one token."""
        asked = [(fact.question, fact.answer) for fact in facts]
        rng.shuffle(asked)
        quotes = _quotes(rng, lines, len(asked) // (QUOTE_EVERY - 1))
        for number, quote in enumerate(quotes):
            asked.insert(QUOTE_EVERY * (number + 1) - 1, quote)
        ids: list[int] = []
        # Asked twice when there is room: two wordings of a prompt need the same place.
        for question, answer in asked + asked:
            turn = self._encode(form.format(q=question, a=answer))
            if ids and len(ids) + len(turn) > room:
                break
            ids += turn[:room]
        return ids


def start_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: the first token is one that much is attended to."""
    plain = list(tokenizer("text", add_special_tokens=False).input_ids)
    whole = list(tokenizer("text").input_ids)
    first = next((at for at, token in enumerate(whole) if token == plain[0]), 0)
    return whole[:first]


def _pieces(text: str) -> list[str]:
    """Lines, long ones in several pieces: places that a fact may be laid in at."""
    pieces = []
    for line in text.splitlines(keepends=True):
        while len(line) > PIECE_MAX:
            cut = line.rfind(" ", 1, PIECE_MAX) + 1 or PIECE_MAX
            pieces.append(line[:cut])
            line = line[cut:]
        pieces.append(line)
    return pieces


def draw_lines(rng: random.Random, texts: list[str], characters: int) -> list[str]:
    """Pieces of texts in random order, from a random place of the first one on."""
    order = rng.sample(texts, len(texts))
    lines: list[str] = []
    taken = 0
    total = sum(map(len, texts))
    for text in order:
        part = _pieces(text)
        if not lines and total > 2 * characters and len(part) > 2:
            part = part[rng.randrange(len(part) // 2) :]
        lines += [*part, "\n"]
        taken += sum(map(len, part))
        if taken >= characters:
            break
    return lines


def lay_in(lines: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> str:
    """The facts as lines of their own among `lines`, each at its depth of 0 to 1, in order."""
    out: list[str] = []
    done = 0
    for fact, depth in zip(facts, depths, strict=True):
        place = round(depth * len(lines))
        out += lines[done:place]
        if out and not out[-1].endswith("\n"):
            out.append("\n")
        out.append(fact + "\n")
        done = max(done, place)
    out += lines[done:]
    if out and not out[-1].endswith("\n"):
        out.append("\n")
    return "".join(out)


def _quotes(rng: random.Random, lines: list[str], count: int) -> list[tuple[str, str]]:
    """Questions for how a line goes on that stands in the text once."""
    shown, asked = QUOTE_WORDS
    told = [words for line in lines if len(words := line.split()) > shown + 2]
    chosen = rng.sample(told, min(count, len(told)))
    return [
        (
            f'How does the line that begins with "{" ".join(words[:shown])}" go on?',
            " ".join(words[shown : shown + asked]),
        )
        for words in chosen
    ]
