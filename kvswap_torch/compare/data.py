"""Documents and questions of a JSONL file, a document at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvswap_torch.errors import ConfigError

SHAPES = (
    "{document, question, answer}, LongBench's {context, input, answers} or RULER's "
    "{input, outputs}"
)
# A document's field -> those of its question and its answer, in the order they are looked for.
FIELDS = {
    "document": (("question", "input"), ("answer", "answers", "outputs")),
    "context": (("question", "input"), ("answer", "answers", "outputs")),
}
# Answers under these names are all wanted; of `answers` any one will do.
ALL_WANTED = ("answer", "outputs")


@dataclass(frozen=True)
class Question:
    """What is asked of a document.

    Attributes
    ----------
    text
        Without the words that a prompt puts around it; of RULER with all words, see `is_prompt`.
    answers
        At least one.
    needs_all
        Whether each of the answers must be given, or any one.
    prefix
        What of the answer is written for the model.
    is_prompt
        Whether `text` is put after the document as it stands.
    task
        What kind of question it is; empty: the file does not say.
    """

    text: str
    answers: tuple[str, ...]
    needs_all: bool = False
    prefix: str = ""
    is_prompt: bool = False
    task: str = ""

    @property
    def expected(self) -> str:
        """The answer whose loss is measured."""
        return ", ".join(self.answers) if self.needs_all else self.answers[0]


@dataclass(frozen=True)
class Document:
    """A text, and the questions about it.

    Attributes
    ----------
    number
        Counts from 0, in the file's order.
    """

    number: int
    text: str
    questions: tuple[Question, ...]


@dataclass
class _Place:
    """Where the lines of a document begin in the file."""

    offsets: list[int] = field(default_factory=list)


class Questions:
    """A JSONL file, of which one document is in memory at a time.

    Lines with the same document belong together, wherever they stand.

    Parameters
    ----------
    path
        One JSON object a line; see `SHAPES`.

    Raises
    ------
    ConfigError
        The file cannot be read, is empty, or a line is no question; names the line.
    """

    def __init__(self, path: Path):
        self.path = path
        places: dict[bytes, _Place] = {}
        whole = hashlib.sha256()
        self.questions = 0
        for number, (offset, line) in enumerate(self._lines(), 1):
            whole.update(line)
            if line.strip():
                text, _ = _parsed(line, f"--data: {path}, line {number}")
                name = hashlib.sha256(text.encode()).digest()
                places.setdefault(name, _Place()).offsets.append(offset)
                self.questions += 1
        if not places:
            raise ConfigError(f"--data: must have a question on each line, got {path}, with none")
        self._places = list(places.values())
        self.digest = whole.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Document:
        text, asked = "", []
        with self.path.open("rb") as file:
            for offset in self._places[number].offsets:
                file.seek(offset)
                text, question = _parsed(file.readline(), f"--data: {self.path}")
                asked.append(question)
        return Document(number, text, tuple(asked))

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        try:
            with self.path.open("rb") as file:
                for line in file:
                    yield offset, line
                    offset += len(line)
        except OSError as error:
            raise ConfigError(
                f"--data: must be a file of JSON lines, got {self.path}: {error.strerror}"
            ) from error


def _parsed(line: bytes, where: str) -> tuple[str, Question]:
    """The document's text, and the question of one line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: must be a JSON object, got {_short(line)}: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {_short(line)}")
    for name, (asked, answered) in FIELDS.items():
        if name in row:
            text = _text(row, name, where)
            question = _text(row, _first(row, asked, where), where)
            return text, _question(row, question, answered, where)
    if "input" in row and "outputs" in row:
        # RULER has one text: the question, and how its answer begins, are the last line.
        text, mark, asked_for = _text(row, "input", where).rpartition("\n")
        if not mark:
            raise ConfigError(f"{where}: input must have a line for the question, its last one")
        return text, _question(row, mark + asked_for, ("outputs",), where, is_prompt=True)
    raise ConfigError(f"{where}: must have the fields {SHAPES}, got {', '.join(row) or 'none'}")


def _question(
    row: dict[str, Any], text: str, answered: tuple[str, ...], where: str, is_prompt: bool = False
) -> Question:
    name = _first(row, answered, where)
    value = row[name]
    answers = tuple(str(each) for each in (value if isinstance(value, list) else [value]))
    if not answers or not all(each.strip() for each in answers):
        raise ConfigError(f"{where}: {name} must be a text, or texts, got {value!r}")
    prefix = row.get("answer_prefix") or ""
    if not isinstance(prefix, str):
        raise ConfigError(f"{where}: answer_prefix must be a text, got {prefix!r}")
    needs_all = name in ALL_WANTED and len(answers) > 1
    task = "" if row.get("task") is None else row["task"]
    if isinstance(task, bool) or not isinstance(task, str | int):
        raise ConfigError(f"{where}: task must be a text or a whole number, got {task!r}")
    return Question(text, answers, needs_all, prefix, is_prompt, str(task))


def _first(row: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in row:
            return name
    raise ConfigError(f"{where}: must have the fields {SHAPES}, got {', '.join(row)}")


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {name} must be a text, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
