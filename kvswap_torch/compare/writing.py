"""Documents with the facts of tasks laid in, as a file of questions that others can be asked too.

The text is that of `kvswap_torch.tuning.text`, of documents that no calibration is fitted to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvswap_torch.compare.data import Question
from kvswap_torch.compare.tasks import TASKS
from kvswap_torch.errors import ConfigError
from kvswap_torch.tuning.documents import draw_lines, lay_in, shipped_texts
from kvswap_torch.whole_file import replace_text

CHARACTERS_PER_TOKEN = 8  # more than any text has: what is too much is cut
FACTS_SHARE_MAX = 0.8  # of a document's tokens; the rest is text


@dataclass(frozen=True)
class Asked:
    """What is written.

    Attributes
    ----------
    tasks
        Names out of `TASKS`; the facts of all stand in each document.
    tokens
        Of a document, at most.
    """

    tasks: tuple[str, ...]
    tokens: int = 4096
    documents: int = 4
    seed: int = 0


def write_questions(path: Path, asked: Asked, tokenizer: Any) -> None:
    """One line a question, in the form of `kvswap_torch.compare.data`; replaces the file at once.

    The same tasks, tokens, seed and tokenizer give the same file.

    Raises
    ------
    ConfigError
        The facts leave no room for text.
    """
    rows = []
    for number in range(asked.documents):
        document, questions = write_document(asked, number, tokenizer)
        rows += [json.dumps(_row(document, question)) + "\n" for question in questions]
    replace_text(path, "".join(rows))


def write_document(asked: Asked, number: int, tokenizer: Any) -> tuple[str, list[Question]]:
    """Document `number`, of at most ``asked.tokens`` tokens, and its questions."""
    rng = random.Random(f"{asked.seed} {asked.tokens} {number}")
    # A task draws the same whichever others there are.
    laid = [TASKS[name](random.Random(f"{asked.seed} {number} {name}")) for name in asked.tasks]
    facts = _in_turn(rng, [each.lines for each in laid])
    texts = [text for at, text in enumerate(shipped_texts()) if at % 3 == 0]
    lines = draw_lines(rng, texts, CHARACTERS_PER_TOKEN * asked.tokens)
    depths = sorted(rng.random() for _ in facts)

    def joined(kept: int) -> str:
        return lay_in(lines[:kept], facts, depths)

    def count(kept: int) -> int:
        # A text that is tried may be longer than the model was made for: no warning of it.
        return len(tokenizer(joined(kept), verbose=False)["input_ids"])

    if count(0) > FACTS_SHARE_MAX * asked.tokens:
        raise ConfigError(
            f"--tasks: facts must leave a fifth of --tokens {asked.tokens} for text, take "
            f"{count(0)}; ask for more tokens or fewer tasks"
        )
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(middle) <= asked.tokens else (low, middle - 1)
    questions = [question for each in laid for question in each.questions]
    return joined(low), questions


def _in_turn(rng: random.Random, groups: Sequence[Sequence[str]]) -> list[str]:
    """All lines in a drawn order; those of a group keep theirs."""
    order = [number for number, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    lines = [iter(group) for group in groups]
    return [next(lines[number]) for number in order]


def _row(document: str, question: Question) -> dict[str, Any]:
    answers = list(question.answers)
    return {
        "task": question.task,
        "document": document,
        "question": question.text,
        "answer": answers if len(answers) > 1 else answers[0],
        "answer_prefix": question.prefix,
    }
