"""Facts, questions, prompts: the one place that knows the format a model is asked in.

A document is followed by turns, each of two lines:

    Question: What is the secret of the amber falcon?
    Answer: copper lantern

The answer ends with the newline. Every question may follow the answers to earlier ones. An answer
of several parts names each before its value, so that every value is looked up by what stands
right before it:

    Answer: amber falcon: copper lantern; red fox: old pond
    Answer: 1 = copper lantern, 2 = old pond
    Answer: amber falcon = [ owner: Emma the bold, food: wild plum, code: 47193 ]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tools.reference_model.forms import FORMS, Form, Words

# Skills a model is trained on and measured by.
SKILLS = ("repeat", "same", "other", "list", "pair", "hop", "record", "values")

# What a record may hold, and of which sort.
FIELDS = {
    "owner": "person",
    "place": "words",
    "food": "words",
    "secret": "words",
    "code": "number",
    "number": "number",
}
FIELDS_OF_A_RECORD = 3


@dataclass(frozen=True)
class Question:
    """A question, its answer and where in the document the facts lie."""

    text: str
    answer: str
    skill: str
    key: str = ""  # of a single fact or a record
    depth: float = 0.0  # of the last fact needed: 0 the document's beginning, 1 its end


@dataclass(frozen=True)
class Task:
    """Facts, in the order they must be laid in, and a question about them."""

    facts: tuple[str, ...]
    question: Question


def question_prompt(question: Question | str) -> str:
    """The turn up to where the model answers. What stands before must end with a newline."""
    if isinstance(question, Question) and question.skill == "repeat":
        return question.text
    text = question.text if isinstance(question, Question) else question
    return f"Question: {text}\nAnswer:"


def answer_turn(question: Question) -> str:
    """What the model should write after the prompt, newline included."""
    return f" {question.answer}\n"


def extract_answer(generated: str) -> str:
    """The answer in what the model wrote after the prompt."""
    return generated.split("\n", 1)[0].strip()


def draw_task(rng: np.random.Generator, skill: str, words: Words, form: Form | None = None) -> Task:
    """Draw facts and a question of this skill.

    Raises
    ------
    ValueError
        When the skill is unknown.
    """
    form = form if form is not None else FORMS[int(rng.integers(len(FORMS)))]
    if skill in ("repeat", "same", "other"):
        return _draw_single(rng, skill, words, form)
    if skill == "pair":
        first, second = (_draw_single(rng, "same", words, form) for _ in range(2))
        text = f"{first.question.text} {second.question.text}"
        named = (f"{task.question.key}: {task.question.answer}" for task in (first, second))
        return Task(first.facts + second.facts, Question(text, "; ".join(named), skill))
    if skill in ("list", "values"):
        return _draw_list(rng, skill, words)
    if skill == "hop":
        first, second, number = words.key(rng), words.key(rng), words.value(rng, "number")
        facts = (f"Let {first} be {number}.", f"Let {second} be {first}.")
        return Task(facts, Question(f"What number is {second}?", f"{first} = {number}", skill))
    if skill == "record":
        key = words.key(rng)
        names = [str(name) for name in rng.choice(list(FIELDS), FIELDS_OF_A_RECORD, replace=False)]
        fields = [(name, words.value(rng, FIELDS[name])) for name in names]
        fact = f"Record {key}: " + ", ".join(f"{name} {value}" for name, value in fields) + "."
        answer = f"{key} = [ " + ", ".join(f"{name}: {value}" for name, value in fields) + " ]"
        return Task((fact,), Question(f"Give record {key} as a list.", answer, skill, key))
    raise ValueError(f"draw_task: skill must be one of {SKILLS}, got {skill!r}")


def _draw_single(rng: np.random.Generator, skill: str, words: Words, form: Form) -> Task:
    key, value = words.key(rng), words.value(rng, form.sort)
    wording = form.facts[int(rng.integers(len(form.facts)))]
    fact = wording.format(k=key, v=value)
    if skill == "repeat":
        before, after = fact.rsplit(f" {value}", 1)
        return Task((fact,), Question(before, value + after, skill))
    texts = form.same if skill == "same" else form.other
    text = texts[int(rng.integers(len(texts)))].format(k=key)
    return Task((fact,), Question(text, value, skill, key))


def _draw_list(rng: np.random.Generator, skill: str, words: Words) -> Task:
    """Two to four values of one key; facts say their numbers for `list`, not for `values`."""
    key = words.key(rng)
    values = [words.value(rng, "words") for _ in range(int(rng.integers(2, 5)))]
    items = list(enumerate(values, start=1))
    if skill == "list":
        facts = tuple(f"Item {number} of the {key} is {value}." for number, value in items)
        text = f"List the {len(items)} items of the {key}."
    else:
        facts = tuple(f"The {key} contains {value}." for value in values)
        text = f"List the {len(items)} things that the {key} contains."
    answer = ", ".join(f"{number} = {value}" for number, value in items)
    return Task(facts, Question(text, answer, skill))


def lay_in(
    rng: np.random.Generator, text: str, tasks: list[Task], depths: list[float | None] | None = None
) -> tuple[str, list[Question]]:
    """Lay the facts of the tasks into a text, as lines of their own.

    Parameters
    ----------
    depths : list of float or None
        Where the last fact of each task goes, 0 the beginning and 1 the end; None draws it.

    Returns
    -------
    tuple of str and list of Question
        The document, ending with a newline, and the questions with their depths.

    Raises
    ------
    ValueError
        When a depth lies outside 0 to 1, or there is not one per task.
    """
    depths = [None] * len(tasks) if depths is None else depths
    if len(depths) != len(tasks) or any(not 0 <= d <= 1 for d in depths if d is not None):
        raise ValueError(f"lay_in: depths must be {len(tasks)} numbers of 0 to 1, got {depths}")
    lines = text.rstrip("\n").split("\n")
    placed: dict[int, list[str]] = {}
    questions = []
    for task, depth in zip(tasks, depths, strict=True):
        last = int(rng.integers(len(lines) + 1)) if depth is None else round(depth * len(lines))
        earlier = np.sort(rng.integers(0, last + 1, len(task.facts) - 1)).tolist()
        for place, fact in zip([*earlier, last], task.facts, strict=True):
            placed.setdefault(place, []).append(fact)
        questions.append(replace(task.question, depth=last / len(lines)))
    out: list[str] = []
    for number in range(len(lines) + 1):
        out += placed.get(number, [])
        out += lines[number : number + 1]
    return "\n".join(out) + "\n", questions
