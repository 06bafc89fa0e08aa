"""Retrieval tasks over the text that comes along: facts to lay in, and questions about them.

The kinds are those of RULER: needles, variables, common and frequent words. A task draws lines for
a document, in the order in which they must stand, and questions. Lines of different tasks say
different things, so that all of them may stand in one document.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvswap_torch.compare.data import Question
from kvswap_torch.errors import ConfigError
from kvswap_torch.tuning.samples import FIRST, KINDS, LAST, THINGS, TOWNS

ASKED = 3  # questions of a task about a document
KEYS = 24  # facts of a kind of which `multi-key` asks for some
VALUES = 4  # of one key
CHAINS, LINKS = 3, 3  # chains of variables, and names of one
COMMON, COMMON_TIMES, RARE = 3, 8, 40  # words listed often, how often, and words listed once
FREQUENT, FREQUENT_TIMES = 3, (16, 11, 8, 4, 3, 2, 2, 1, 1, 1, 1, 1)
LISTED = 6  # words of a line


@dataclass(frozen=True)
class Laid:
    """What a task puts into a document, and asks.

    Attributes
    ----------
    lines
        Each a line of its own, in this order; where they stand is drawn.
    """

    lines: tuple[str, ...]
    questions: tuple[Question, ...]


def needle(rng: random.Random) -> Laid:
    """A number for each of a few towns."""
    return _numbers(rng, rng.sample(TOWNS, ASKED), "special magic number for", "needle")


def multi_key(rng: random.Random) -> Laid:
    """A number for some of many things."""
    names = [f"the {kind} {thing}" for kind, thing in _pairs(rng, KINDS, THINGS, KEYS)]
    return _numbers(rng, names, "access code of", "multi-key")


def _numbers(rng: random.Random, names: Sequence[str], what: str, task: str) -> Laid:
    values = dict(zip(names, _digits(rng, len(names)), strict=True))
    lines = [f"The {what} {name} is {value}." for name, value in values.items()]
    asked = [
        Question(
            f"What is the {what} {name}?",
            (values[name],),
            prefix=f"The {what} {name} is",
            task=task,
        )
        for name in names[:ASKED]
    ]
    rng.shuffle(lines)
    return Laid(tuple(lines), tuple(asked))


def multi_value(rng: random.Random) -> Laid:
    """All numbers of a person, each in a line of its own; answered in the document's order."""
    names = [f"{first} {last}" for first, last in _pairs(rng, FIRST, LAST, ASKED)]
    said = list(zip(names * VALUES, _digits(rng, ASKED * VALUES), strict=True))
    rng.shuffle(said)
    asked = [
        Question(
            f"What are all {VALUES} lucky numbers of {name}?",
            tuple(value for whose, value in said if whose == name),
            needs_all=True,
            prefix=f"The lucky numbers of {name} are",
            task="multi-value",
        )
        for name in names
    ]
    lines = [f"One of the lucky numbers of {name} is {value}." for name, value in said]
    return Laid(tuple(lines), tuple(asked))


def multi_query(rng: random.Random) -> Laid:
    """Two numbers in one question."""
    names = [f"{kind}_{thing}" for kind, thing in _pairs(rng, KINDS, THINGS, 2 * ASKED)]
    values = dict(zip(names, _digits(rng, len(names)), strict=True))
    lines = [f"Setting {name} has the value {value}." for name, value in values.items()]
    asked = [
        Question(
            f"What are the values of the settings {one} and {two}?",
            (values[one], values[two]),
            needs_all=True,
            prefix=f"The settings {one} and {two} have the values",
            task="multi-query",
        )
        for one, two in zip(names[::2], names[1::2], strict=True)
    ]
    rng.shuffle(lines)
    return Laid(tuple(lines), tuple(asked))


def variables(rng: random.Random) -> Laid:
    """Chains of assignments; all names that have a chain's number."""
    numbers = rng.sample(range(10, 100), CHAINS * LINKS)
    names = [f"V{number}" for number in numbers]
    values = _digits(rng, CHAINS)
    # Links of all chains in turn, so that each stands after the one that it takes its value from.
    lines = [
        f"Assign {names[chain + CHAINS * link]} = "
        + (values[chain] if link == 0 else names[chain + CHAINS * (link - 1)])
        for link in range(LINKS)
        for chain in range(CHAINS)
    ]
    asked = tuple(
        Question(
            f"Which {LINKS} variables have the value {values[chain]}, directly or through others?",
            tuple(names[chain::CHAINS]),
            needs_all=True,
            prefix=f"The variables with the value {values[chain]} are",
            task="variables",
        )
        for chain in range(CHAINS)
    )
    return Laid(tuple(lines), asked)


def common_words(rng: random.Random) -> Laid:
    """Words that are listed often, among many that are listed once."""
    words = rng.sample(THINGS, min(len(THINGS), COMMON + RARE))
    return _listed(
        rng, words[:COMMON] * COMMON_TIMES + words[COMMON:], tuple(words[:COMMON]),
        "Shelf", f"Which {COMMON} words are listed most often on the shelves?",
        "The most common words on the shelves are", "common-words",
    )  # fmt: skip


def frequent_words(rng: random.Random) -> Laid:
    """Made-up words, each a fixed share less often than the one before; the most frequent ones."""
    letters = "bdfgklmnprstvz"
    words: list[str] = []
    while len(words) < len(FREQUENT_TIMES):
        word = "".join(rng.choice(letters) + rng.choice("aeiou") for _ in range(3))
        words += [word] if word not in words else []
    listed = [w for w, n in zip(words, FREQUENT_TIMES, strict=True) for _ in range(n)]
    return _listed(
        rng, listed, tuple(words[:FREQUENT]),
        "Signal", f"Which {FREQUENT} words are sent most often in the signals?",
        "The most frequent words in the signals are", "frequent-words",
    )  # fmt: skip


def _listed(
    rng: random.Random, words: list[str], answers: tuple[str, ...],
    what: str, text: str, prefix: str, task: str,
) -> Laid:  # fmt: skip
    rng.shuffle(words)
    rows = [words[first : first + LISTED] for first in range(0, len(words), LISTED)]
    lines = [f"{what} {number}: {', '.join(row)}." for number, row in enumerate(rows, 1)]
    return Laid(tuple(lines), (Question(text, answers, needs_all=True, prefix=prefix, task=task),))


TASKS: dict[str, Callable[[random.Random], Laid]] = {
    "needle": needle,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "variables": variables,
    "common-words": common_words,
    "frequent-words": frequent_words,
}


def parse_tasks(text: str) -> tuple[str, ...]:
    """Names with commas between; ``all`` of them.

    Raises
    ------
    ConfigError
        One is unknown, or there is none.
    """
    names = [name for name in text.replace(" ", "").split(",") if name]
    found = dict.fromkeys(each for name in names for each in (TASKS if name == "all" else [name]))
    unknown = [name for name in found if name not in TASKS]
    if unknown or not found:
        raise ConfigError(
            f"--tasks: must be all or among {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
        )
    return tuple(found)


def _pairs(
    rng: random.Random, firsts: Sequence[str], seconds: Sequence[str], count: int
) -> list[tuple[str, str]]:
    """Different ones."""
    drawn = rng.sample(range(len(firsts) * len(seconds)), count)
    return [(firsts[at // len(seconds)], seconds[at % len(seconds)]) for at in drawn]


def _digits(rng: random.Random, count: int) -> list[str]:
    """Different numbers of six digits."""
    return [str(number) for number in rng.sample(range(100_000, 1_000_000), count)]
