"""What a model is calibrated on: tokens, facts laid into them, and questions about those."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """A document and what follows it.

    Parameters
    ----------
    ids
        ``[tokens]`` int64.
    focus
        The first token that would be decoded with selection on: a question, an answer. Attention
        recall is measured from here to the end.
    """

    ids: torch.Tensor
    focus: int

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.ids.dtype != torch.int64:
            raise ValueError(
                f"sample: ids must be a [tokens] int64 tensor, got {self.ids.dtype} "
                f"{list(self.ids.shape)}"
            )
        if not 0 < self.focus < len(self.ids):
            raise ValueError(
                f"sample: focus must lie inside the {len(self.ids)} tokens, after at least one "
                f"that is only read, got {self.focus}"
            )


def _words(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


KINDS = _words("""
amber autumn bronze cedar cobalt coral crimson distant eastern emerald frozen gentle golden
granite hidden hollow ivory lonely lower marble midnight narrow northern old painted quiet river
round scarlet second silver southern stone summer upper velvet western white wild winter
""")
THINGS = _words("""
anchor archive arrow bakery barn basket beacon bell bridge cabin canal castle chapel clock compass
cottage depot engine falcon ferry forest fountain gallery garden gate harbour hotel island kettle
lantern ledger library lighthouse market meadow mill museum office orchard otter palace pavilion
pump quarry school station statue stove temple theatre tower tunnel valley vault village wagon
well workshop
""")
FIRST = _words("""
Ada Amir Anna Boris Carla Chen David Elena Emma Felix Grace Hana Hugo Ines Ivan Jonas Julia Karim
Laura Leo Lin Maria Marta Nadia Noah Omar Oscar Paula Peter Rosa Ruth Samir Sofia Theo Vera Viktor
""")
LAST = _words("""
Abbott Baker Bennett Castro Dawson Engel Fischer Fontaine Garcia Haas Hansen Ito Jansen Keller
Kowalski Lindgren Lopez Marsh Meyer Novak Okafor Olsen Park Petrov Quinn Rossi Sato Schmidt Silva
Singh Tanaka Turner Vargas Weber Winter Zhang
""")
TOWNS = _words("""
Ashford Bergen Brighton Coimbra Dresden Fargo Galway Ghent Halifax Kyoto Leeds Lyon Malmo
Marseille Nairobi Oslo Padua Porto Quito Riga Salem Seville Tampere Toledo Utrecht Verona Vienna
Zagreb
""")
MONTHS = _words("""
January February March April May June July August September October November December
""")


@dataclass(frozen=True)
class Form:
    """One kind of fact: how it is stated and asked for; {k} what it is about, {v} what is asked."""

    key: str  # thing, person or name
    value: str  # words, number, person, town, date or code
    told: tuple[str, ...]
    asked: tuple[str, ...]


FORMS = (
    Form("thing", "words",
         ("The secret of the {k} is {v}.", "Remember that the secret of the {k} is {v}."),
         ("What is the secret of the {k}?", "What does the {k} hide?")),
    Form("thing", "number",
         ("The code for the {k} is {v}.", "To open the {k}, enter {v}."),
         ("What is the code for the {k}?", "Which number opens the {k}?")),
    Form("thing", "person",
         ("The owner of the {k} is {v}.", "The {k} has belonged to {v} for many years."),
         ("Who is the owner of the {k}?", "Who does the {k} belong to?")),
    Form("thing", "words",
         ("The {k} is kept near the {v}.", "You will find the {k} right behind the {v}."),
         ("Near what is the {k} kept?", "Where can the {k} be found?")),
    Form("thing", "number",
         ("The {k} was sold for {v} coins.", "Somebody paid {v} coins for the {k}."),
         ("For how many coins was the {k} sold?", "How much did the {k} cost?")),
    Form("person", "town",
         ("{k} lives in {v}.", "After the war {k} moved to {v} and stayed there."),
         ("Where does {k} live?", "In which town is {k} at home?")),
    Form("person", "date",
         ("{k} was born on {v}.", "On {v} the family celebrated the birth of {k}."),
         ("When was {k} born?", "On which day did the life of {k} begin?")),
    Form("person", "number",
         ("The telephone number of {k} is {v}.", "{k} can be reached under {v}."),
         ("What is the telephone number of {k}?", "Under which number can {k} be reached?")),
    Form("name", "code",
         ("{k} = {v}", "set {k} to {v};", "Key {k}: {v}"),
         ("What is the value of {k}?", "What is stored under {k}?")),
    Form("name", "person",
         ("Ticket {k} is assigned to {v}.", "{v} has taken over ticket {k}."),
         ("To whom is ticket {k} assigned?", "Who works on ticket {k}?")),
    Form("thing", "date",
         ("The {k} was opened on {v}.", "Since {v} everybody may visit the {k}."),
         ("When was the {k} opened?", "Since when may everybody visit the {k}?")),
    Form("thing", "town",
         ("The {k} was built by workers from {v}.", "All parts of the {k} came from {v}."),
         ("Where did the workers who built the {k} come from?", "Whence is the {k}?")),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A sentence, and one question that it answers."""

    text: str
    question: str
    answer: str


class FactMaker:
    """Draws facts; no two are about the same thing."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._keys: set[str] = set()

    def draw(self, count: int) -> list[Fact]:
        """Facts of all forms in turn, so that each has others like it."""
        first = self._rng.randrange(len(FORMS))
        return [self._fact(FORMS[(first + number) % len(FORMS)]) for number in range(count)]

    def _fact(self, form: Form) -> Fact:
        key, value = self._key(form.key), self._value(form.value)
        told = self._rng.choice(form.told).format(k=key, v=value)
        asked = self._rng.choice(form.asked).format(k=key)
        return Fact(told[0].upper() + told[1:] if form.key != "name" else told, asked, value)

    def _key(self, kind: str) -> str:
        for attempt in range(1000):
            if kind == "thing":
                key = f"{self._pick(KINDS)} {self._pick(THINGS)}"
            elif kind == "person":
                key = f"{self._pick(FIRST)} {self._pick(LAST)}"
            else:
                key = f"{self._pick(KINDS)}_{self._pick(THINGS)}"
            if attempt > 100:  # the lists are nearly used up
                key += f" {self._rng.randrange(2, 10**6)}"
            if key not in self._keys:
                self._keys.add(key)
                return key
        raise AssertionError("facts: no key is left")

    def _value(self, kind: str) -> str:
        if kind == "words":
            return f"{self._pick(KINDS)} {self._pick(THINGS)}"
        if kind == "person":
            return f"{self._pick(FIRST)} {self._pick(LAST)}"
        if kind == "town":
            return self._pick(TOWNS)
        if kind == "date":
            year = self._rng.randrange(1900, 2020)
            return f"{self._rng.randrange(1, 29)} {self._pick(MONTHS)} {year}"
        digits = self._rng.randrange(3, 7)
        number = str(self._rng.randrange(10 ** (digits - 1), 10**digits))
        return number if kind == "number" else f"{self._pick(THINGS)}-{number}"

    def _pick(self, words: tuple[str, ...]) -> str:
        return self._rng.choice(words)
