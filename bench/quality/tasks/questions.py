"""Questions about two real documents, with facts that stand in them as answers.

The documents are those of the demo, whole: `--text examples/reference_model/documents/NAME.txt`.
Nothing is laid in. Each question names the words its fact stands in, and is asked where a document
has them once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.quality.wording import ReferenceWording, Turn

ASKED_MAX = 8  # of a document
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Known:
    """A question that somebody wrote down.

    Parameters
    ----------
    fact
        Words of the document that have the answer, and stand there once.
    begun
        What of the answer is written for the model, so that its form is fixed.
    """

    fact: str
    question: str
    begun: str
    answer: str


@cache
def load() -> dict[str, tuple[Known, ...]]:
    """Document's name -> what can be asked about it."""
    written = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: tuple(Known(**each) for each in known) for name, known in written.items()}


def questions(wording: ReferenceWording, document: str) -> list[tuple[Turn, float]]:
    """Turns about a document, and the depth of the fact of each in it, 0 to 1.

    Where more facts stand in it than are asked for, those asked for lie all over it.

    Raises
    ------
    ValueError
        When none of the facts stands in the document.
    """
    there = [known for each in load().values() for known in each]
    there = [known for known in there if document.count(known.fact) == 1]
    there.sort(key=lambda known: document.index(known.fact))
    if not there:
        raise ValueError(
            "questions: the document must hold facts that are asked for, and holds none; they are "
            f"about --text examples/reference_model/documents/ {', '.join(load())}"
        )
    step = max(1.0, len(there) / ASKED_MAX)
    chosen = [there[int(step * i)] for i in range(min(len(there), ASKED_MAX))]
    return [
        (
            wording.quote(known.question, known.begun, known.answer),
            document.index(known.fact) / len(document),
        )
        for known in chosen
    ]
