"""One document over one cache: read once, then every question asked after it."""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.compare.data import Document, Question
from kvswap_torch.hf.families import input_device

if TYPE_CHECKING:
    from kvswap_torch.cli.prompt import Prompt

CHUNK = 4096  # tokens of the document per forward pass
CONTAINS, EXACT = "contains", "exact"
STEPS, ONE_PASS = "steps", "chunk"


@dataclass(frozen=True)
class Asked:
    """A question's tokens.

    Attributes
    ----------
    ids
        From the document's end to where the answer begins.
    answer
        Of the expected answer.
    """

    question: Question
    ids: torch.Tensor
    answer: torch.Tensor


@dataclass(frozen=True)
class Encoded:
    """A document's tokens, and its questions'.

    Attributes
    ----------
    longest
        Tokens from the document's first to the last that may follow it.
    """

    number: int
    ids: torch.Tensor
    asked: tuple[Asked, ...]
    longest: int


def encoded(document: Document, tokenizer: Any, prompt: Prompt, new_tokens: int) -> Encoded:
    """A document as a model reads it."""
    plain = prompt.special_tokens
    is_prompt = any(question.is_prompt for question in document.questions)
    ids = (
        list(tokenizer(document.text)["input_ids"])
        if is_prompt
        else prompt.prefix_ids(tokenizer, document.text)
    )
    asked = []
    for question in document.questions:
        if question.is_prompt:
            before = list(tokenizer(question.text, add_special_tokens=False)["input_ids"])
        else:
            before = prompt.question_ids(tokenizer, question.text, 0)
        # A chat's answer begins a turn; others follow a word.
        space = " " if plain or question.is_prompt else ""
        if question.prefix:
            begun = question.prefix if question.prefix[0].isspace() else space + question.prefix
            before += tokenizer(begun, add_special_tokens=False)["input_ids"]
            space = "" if begun[-1].isspace() else " "
        answer = tokenizer(space + question.expected, add_special_tokens=False)["input_ids"]
        asked.append(Asked(question, torch.tensor(before), torch.tensor(answer)))
    most = max(len(each.ids) + max(len(each.answer), new_tokens) for each in asked)
    return Encoded(document.number, torch.tensor(ids), tuple(asked), len(ids) + most)


@dataclass(frozen=True)
class Way:
    """How answers are taken and judged.

    Attributes
    ----------
    accuracy
        ``contains``: a greedy answer of at most `new_tokens` has the expected one in it.
        ``exact``: each token of the expected answer is the most likely one after those before.
    questions
        ``steps``: token by token, under selection, as what is decoded. ``chunk``: in one pass, as
        the cache reads prompts.
    """

    accuracy: str = CONTAINS
    questions: str = STEPS
    new_tokens: int = 32


@dataclass
class Steps:
    """Single tokens that were decoded over a cache, timed."""

    seconds: list[float] = field(default_factory=list)
    bytes_read: int = 0

    def figures(self) -> dict[str, Any]:
        count = len(self.seconds)
        return {
            "steps": count,
            "ms_per_token": round(1e3 * median(self.seconds), 3) if count else None,
            "bytes_read_per_token": round(self.bytes_read / count) if count else None,
        }


@torch.inference_mode()
def ask_all(
    model: Any,
    cache: Any,
    document: Encoded,
    tokenizer: Any,
    way: Way,
    bytes_read: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """Reads the document, and asks each question right after it.

    Parameters
    ----------
    bytes_read
        What the cache has read so far.

    Returns
    -------
    dict
        ``answers``, each with ``accuracy`` from 0 to 1 and ``loss``, mean over the expected
        answer's tokens, in nats, and the question's ``task``, if it has one; ``steps``,
        ``ms_per_token`` (median) and ``bytes_read_per_token``.
    """
    reader = _Reader(model, cache, bytes_read)
    for ids in document.ids.split(CHUNK):
        reader.read(ids)
    answers: list[dict[str, Any]] = []
    for asked in document.asked:
        task = {"task": asked.question.task} if asked.question.task else {}
        answers.append(_ask(reader, asked, tokenizer, way) | task)
        reader.crop(len(document.ids))
    return {"answers": answers} | reader.steps.figures()


def _ask(reader: _Reader, asked: Asked, tokenizer: Any, way: Way) -> dict[str, float]:
    first = reader.read(asked.ids) if way.questions == ONE_PASS else reader.decode(asked.ids)
    begin = reader.length()
    rows = [first]
    for place in range(len(asked.answer) - 1):
        rows.append(reader.decode(asked.answer[place : place + 1]))
    logs = torch.stack(rows).log_softmax(-1)
    answer = asked.answer.to(logs.device)
    loss = -logs.gather(1, answer[:, None]).mean().item()
    is_exact = bool((logs.argmax(-1) == answer).all())
    if is_exact or way.accuracy == EXACT:
        # The tokens that follow by themselves begin with the answer.
        return {"accuracy": float(is_exact), "loss": round(loss, 5)}
    reader.crop(begin)
    said = tokenizer.decode(_greedy(reader, first, way.new_tokens), skip_special_tokens=True)
    return {"accuracy": judge(said, asked.question), "loss": round(loss, 5)}


def _greedy(reader: _Reader, row: torch.Tensor, new_tokens: int) -> list[int]:
    said: list[int] = []
    while len(said) < new_tokens:
        said.append(int(row.argmax()))
        if said[-1] in reader.ends or len(said) == new_tokens:
            break
        row = reader.decode(torch.tensor(said[-1:]))
    return said


def judge(said: str, question: Question) -> float:
    """How much of what is wanted was said: 1 or 0 of any answer, else the share of all of them.

    Letters count, not their case; spaces and punctuation around an answer do not.
    """
    heard = _plain(said)
    found = [_plain(answer) in heard for answer in question.answers]
    return sum(found) / len(found) if question.needs_all else float(any(found))


def _plain(text: str) -> str:
    words = " ".join(text.casefold().split())
    return words.strip(string.punctuation + " ") or words


class _Reader:
    """A model over a cache."""

    def __init__(self, model: Any, cache: Any, bytes_read: Callable[[], int]):
        self._model, self._cache, self._bytes_read = model, cache, bytes_read
        self._named = cache_argument(model, cache)
        self._device = input_device(model)
        self.steps = Steps()
        self._is_counted = True
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.ends: Sequence[int] = ends if isinstance(ends, list) else [ends]

    def length(self) -> int:
        return self._cache.get_seq_length()

    def crop(self, tokens: int) -> None:
        if self.length() > tokens:
            self._cache.crop(tokens - self.length())
            self._is_counted = False

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The last row of logits after one pass over `ids`, fp32."""
        ids = ids[None].to(self._device)
        return self._model(input_ids=ids, **self._named, logits_to_keep=1).logits[0, -1].float()

    def decode(self, ids: torch.Tensor) -> torch.Tensor:
        """As `read`, token by token, timed.

        The first one after a crop does not count: it finds again what the crop took away.
        """
        row, before = None, self._bytes_read()
        for token in ids.split(1):
            began = time.perf_counter()
            row = self.read(token)
            if self._is_counted:
                self.steps.seconds.append(time.perf_counter() - began)
            else:
                self._is_counted, before = True, self._bytes_read()
        self.steps.bytes_read += self._bytes_read() - before
        if row is None:
            raise ValueError("decode: must have a token, got none")
        return row
