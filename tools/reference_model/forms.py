"""What facts look like and how they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.reference_model.words import ADJECTIVES, NAMES, NOUNS


@dataclass(frozen=True)
class Form:
    """One kind of fact: its wordings, and questions in the same and in other words."""

    name: str
    sort: str  # of the value: words, number or person
    facts: tuple[str, ...]
    same: tuple[str, ...]
    other: tuple[str, ...]


FORMS = (
    Form(
        "secret",
        "words",
        ("The secret of the {k} is {v}.", "Remember that the secret of the {k} is {v}."),
        ("What is the secret of the {k}?",),
        ("What does the {k} hide?", "What must nobody know about the {k}?"),
    ),
    Form(
        "code",
        "number",
        ("The code for the {k} is {v}.", "- code for the {k} = {v};"),
        ("What is the code for the {k}?",),
        ("Which number opens the {k}?",),
    ),
    Form(
        "owner",
        "person",
        ("The owner of the {k} was called {v}.", "Note: the owner of the {k} is {v}."),
        ("Who is the owner of the {k}?",),
        ("Who did the {k} belong to?",),
    ),
    Form(
        "place",
        "words",
        ("The {k} is kept near the {v}.",),
        ("Near what is the {k} kept?",),
        ("Where can the {k} be found?",),
    ),
    Form(
        "key",
        "words",
        ("Key {k}: {v}",),
        ("What is the value of key {k}?",),
        ("What is stored under {k}?",),
    ),
    Form(
        "price",
        "number",
        ("The {k} was sold for {v} coins.",),
        ("For how many coins was the {k} sold?",),
        ("How much did the {k} cost?",),
    ),
    Form(
        "food",
        "words",
        ("The {k} likes to eat {v}.",),
        ("What does the {k} like to eat?",),
        ("Which food is the favourite of the {k}?",),
    ),
)


def draw_form(rng: np.random.Generator, sort: str | None) -> Form:
    """One kind of fact, whose values are of this sort; None: of any."""
    forms = [form for form in FORMS if sort is None or form.sort == sort]
    return forms[int(rng.integers(len(forms)))]


class Words:
    """Draws keys and values.

    Parameters
    ----------
    extra : list of str
        More words, taken now and then in place of the readable ones, so that a model does not
        rely on a closed list. Empty for evaluation.
    extra_share : float
        How often a word comes from `extra`.
    distinct : bool
        Never draw a key twice.
    """

    def __init__(
        self, extra: list[str] | None = None, extra_share: float = 0.0, distinct: bool = False
    ) -> None:
        self.extra = extra or []
        self.extra_share = extra_share if self.extra else 0.0
        self.distinct = distinct
        self.drawn: set[str] = set()

    def pick(self, rng: np.random.Generator, words: list[str]) -> str:
        if self.extra_share and rng.random() < self.extra_share:
            words = self.extra
        return words[int(rng.integers(len(words)))]

    def key(self, rng: np.random.Generator) -> str:
        """Two words, such as `amber falcon`."""
        while True:
            key = f"{self.pick(rng, ADJECTIVES)} {self.pick(rng, NOUNS)}"
            if not self.distinct or key not in self.drawn:
                if self.distinct:
                    self.drawn.add(key)
                return key

    def value(self, rng: np.random.Generator, sort: str) -> str:
        """A value of this sort: `copper lantern`, `47193`, `Emma the bold`."""
        if sort == "number":
            digits = int(rng.integers(3, 7))
            return str(int(rng.integers(10 ** (digits - 1), 10**digits)))
        if sort == "person":
            return f"{self.pick(rng, NAMES)} the {self.pick(rng, ADJECTIVES)}"
        length = int(rng.choice([1, 2, 2, 2, 3]))
        words = [self.pick(rng, ADJECTIVES) for _ in range(length - 1)]
        return " ".join([*words, self.pick(rng, NOUNS)])
