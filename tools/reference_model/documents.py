"""Real documents with facts laid in, to ask a model about.

The sources lie in `examples/reference_model/documents/`, free to redistribute and never trained
on. Another seed lays in other facts:

    text, questions = make_document(load_source("perl_operators"), 7, 24_000, count_tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tools.reference_model.forms import FORMS, Words
from tools.reference_model.place import MODEL
from tools.reference_model.tasks import Question, draw_task, lay_in

FOLDER = MODEL / "documents"
SOURCES = ("python_logging", "perl_operators")
BLOCK_LINES = 32
# What `make demo` asks: single facts in the same and in other words, two at once, a record.
ASKED = ("same", "other", "record", "other", "pair", "same")


def load_source(name: str) -> str:
    """The plain text of a document.

    Raises
    ------
    ValueError
        When there is no such document.
    """
    if name not in SOURCES:
        raise ValueError(f"load_source: name must be one of {SOURCES}, got {name!r}")
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def cut_lines(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest beginning of whole lines with at most so many tokens.

    Raises
    ------
    ValueError
        When the text is shorter than that.
    """
    # A newline is always a token of its own, so tokens of lines add up.
    lines = text.splitlines(keepends=True)
    taken = 0
    for step in (BLOCK_LINES, 1):
        while taken < len(lines):
            count = count_tokens("".join(lines[taken : taken + step]))
            if count > tokens:
                break
            tokens -= count
            taken += step
    if taken >= len(lines):
        raise ValueError(
            f"make_document: the text must be longer than the document, {tokens} tokens are left;"
            " ask for fewer tokens"
        )
    return "".join(lines[:taken])


def make_document(
    source: str,
    seed: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    *,
    asked: Sequence[str] = ASKED,
    facts: int = 9,
    depths: Sequence[float] | None = None,
) -> tuple[str, list[Question]]:
    """Lay facts and distractors into a text.

    Parameters
    ----------
    source : str
        The text; its beginning is taken.
    seed : int
        Same seed, same facts.
    tokens : int
        Length wanted; the document has at most so many.
    count_tokens : callable
        Tokens of a string.
    asked : sequence of str
        Skill of each question, in the order asked. Each comes with `facts` - 1 distractors:
        facts of the same form about other things.
    facts : int
        Facts of the form of each question; at least 1.
    depths : sequence of float
        Where the facts asked for lie, 0 to 1; drawn when None.

    Returns
    -------
    tuple of str and list of Question
        The document, ending with a newline, and one question per entry of `asked`.
    """
    if facts < 1:
        raise ValueError(f"make_document: facts must be at least 1, got {facts}")
    rng = np.random.default_rng(seed)
    words = Words(distinct=True)
    wanted, others = [], []
    forms = rng.permutation(len(FORMS))
    for number, skill in enumerate(asked):
        form = FORMS[int(forms[number % len(FORMS)])]
        wanted.append(draw_task(rng, skill, words, form))
        others += [draw_task(rng, skill, words, form) for _ in range(facts - 1)]
    tasks = wanted + others
    spent = sum(count_tokens(fact + "\n") for task in tasks for fact in task.facts)
    text = cut_lines(source, tokens - spent, count_tokens)
    places = [*(depths if depths is not None else [None] * len(wanted)), *[None] * len(others)]
    document, questions = lay_in(rng, text, tasks, places)
    return document, questions[: len(wanted)]
