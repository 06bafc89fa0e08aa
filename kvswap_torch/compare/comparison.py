"""Methods over the documents of a file: what is missing is measured, and kept as it comes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.compare.asking import Encoded, Way, ask_all, encoded
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.compare.data import Questions
from kvswap_torch.compare.journal import Journal
from kvswap_torch.compare.method import FULL, Budget, Method
from kvswap_torch.compare.results import FORMAT, VERSION
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.hf.families import input_device, model_parts
from kvswap_torch.hf.full_cache import full_cache
from kvswap_torch.hf.weights_digest import weights_of
from kvswap_torch.positions import most_positions

if TYPE_CHECKING:
    from kvswap_torch.cli.prompt import Prompt

PROBED_TOKENS, PROBED_STEPS = 256, 4
ENCODING = 2  # raised when a question's tokens change: lines of before are of other questions
KEY = ("setting", "document", "method", "budget")


@dataclass(frozen=True)
class Run:
    """A document read once: by the full cache, or by a method in a budget."""

    document: int
    method: Method | None
    budget: Budget | None

    @property
    def name(self) -> str:
        return FULL if self.method is None else self.method.name

    @property
    def budget_text(self) -> str | None:
        return None if self.budget is None else self.budget.text


@dataclass(frozen=True)
class Cost:
    """What a comparison takes, before it begins.

    Attributes
    ----------
    tokens, longest
        Of all documents, and of the longest with what follows it.
    runs, left
        Documents read, in all and that the journal does not have.
    read_tokens, steps
        Of the runs that are left: tokens of documents, and tokens that are decoded one by one, at
        most.
    seconds
        By a pass of a few hundred tokens and a few steps of the full cache, which were timed; what
        attention to a long document takes comes on top.
    disk_bytes, memory_bytes
        Of the longest document: on disk at once, and as a full cache in memory.
    """

    documents: int
    questions: int
    tokens: int
    longest: int
    runs: int
    left: int
    read_tokens: int
    steps: int
    seconds: float
    disk_bytes: int
    memory_bytes: int


class Comparison:
    """A model, questions and methods.

    Parameters
    ----------
    path
        Folder on the disk for caches.
    journal
        Lines of other settings in the same file are left alone.
    is_beside_full
        Whether the full cache is run too; it must fit in memory.

    Raises
    ------
    ConfigError, UnsupportedModelError
        A document is longer than the model was made for, or the model is none to compare with.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: Prompt,
        questions: Questions,
        methods: Sequence[Method],
        budgets: Sequence[Budget],
        way: Way,
        path: Path,
        journal: Path,
        *,
        is_beside_full: bool = True,
    ):
        self.model, self.questions, self.way = model, questions, way
        self._tokenizer, self._prompt, self._path = tokenizer, prompt, path
        self.parts = model_parts(model)
        if is_beside_full:
            full_cache(model, "compare")
        self.model_digest = _digest(weights_of(self.parts).facts())
        self._setting = self._settings_digest()
        self._journal = Journal(journal, KEY)
        self._sizes = [self._size(document) for document in self._encoded()]
        self._methods, self._budgets = tuple(methods), tuple(budgets)
        self._is_beside_full = is_beside_full

    def _settings_digest(self) -> str:
        """What lines of the journal must have in common to stand in one table."""
        prompt = dataclasses.astuple(self._prompt)
        asked = [self.questions.digest, prompt, dataclasses.astuple(self.way)]
        return _digest([ENCODING, self.model_digest, str(self.parts.dtype), *asked])

    def _document(self, number: int) -> Encoded:
        document = self.questions[number]
        return encoded(document, self._tokenizer, self._prompt, self.way.new_tokens)

    def _encoded(self) -> Iterator[Encoded]:
        return (self._document(number) for number in range(len(self.questions)))

    def _size(self, document: Encoded) -> tuple[int, int, int]:
        """Tokens of the document; with what follows; decoded ones, at most."""
        most = most_positions(self.parts.config)
        if most is not None and document.longest > most:
            raise ConfigError(
                f"questions: document {document.number + 1} and what follows must be at most the "
                f"{most:,} tokens that the model was made for, come to {document.longest:,}; "
                "shorten it, or lower --tokens"
            )
        asked = sum(len(each.ids) for each in document.asked)
        said = sum(len(each.answer) + self.way.new_tokens for each in document.asked)
        steps = said + (asked if self.way.questions == "steps" else 0)
        return len(document.ids), document.longest, steps

    def runs(self) -> Iterator[Run]:
        """All, a document at a time."""
        for number in range(len(self.questions)):
            if self._is_beside_full:
                yield Run(number, None, None)
            for budget in self._budgets:
                for method in self._methods:
                    yield Run(number, method, budget)

    def _key(self, run: Run) -> tuple[Any, ...]:
        return self._setting, run.document, run.name, run.budget_text or ""

    def left(self) -> list[Run]:
        """Those that the journal does not have."""
        return [run for run in self.runs() if not self._journal.has(*self._key(run))]

    def cost(self) -> Cost:
        """What is to come; a few hundred tokens are read to time them."""
        left = self.left()
        read = sum(self._sizes[run.document][0] for run in left)
        steps = sum(self._sizes[run.document][2] for run in left)
        a_token, a_step = self._timed() if left else (0.0, 0.0)
        longest = max(size[1] for size in self._sizes)
        return Cost(
            documents=len(self.questions),
            questions=self.questions.questions,
            tokens=sum(size[0] for size in self._sizes),
            longest=longest,
            runs=sum(1 for _ in self.runs()),
            left=len(left),
            read_tokens=read,
            steps=steps,
            seconds=read * a_token + steps * a_step,
            disk_bytes=self.parts.shape.kv_bytes(longest),
            memory_bytes=self.parts.shape.kv_bytes(longest) if self._is_beside_full else 0,
        )

    @torch.inference_mode()
    def _timed(self) -> tuple[float, float]:
        """Seconds of a token that is read among many, and of a step."""
        ids = self._document(0).ids[:PROBED_TOKENS, None].T.to(input_device(self.model))
        times = []
        output: Any = None
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
            times.append(time.perf_counter() - began)
        cache = getattr(output, "cache", None) or output.past_key_values
        began = time.perf_counter()
        for _ in range(PROBED_STEPS):
            self.model(input_ids=ids[:, -1:], **cache_argument(self.model, cache))
        return times[-1] / ids.shape[1], (time.perf_counter() - began) / PROBED_STEPS

    def run(self, progress: Callable[[Run, int], None] = lambda run, number: None) -> None:
        """Measures what is left; each line is on disk as soon as it is there.

        Parameters
        ----------
        progress
            Called before each run, with how many are done.
        """
        document: Encoded | None = None
        for number, run in enumerate(self.left()):
            progress(run, number)
            if document is None or document.number != run.document:
                document = self._document(run.document)
            self._journal.add(dict(zip(KEY, self._key(run), strict=True)) | self._measured(
                run, document))  # fmt: skip

    def _measured(self, run: Run, document: Encoded) -> dict[str, Any]:
        tokens = len(document.ids)
        size = Bytes(self.parts, document.longest, self._path, tokens)
        full = size.full
        line: dict[str, Any] = {"tokens": tokens, "full_bytes": full}
        if run.method is None or run.budget is None:
            cache = full_cache(self.model, "compare")
            found = ask_all(self.model, cache, document, self._tokenizer, self.way)
            return line | {"memory_bytes": full} | found
        budget = run.budget
        try:
            fitted = run.method.fitted(budget, size)
            most = budget.in_bytes(full) if budget.kind == "bytes" else None
            if fitted is not None and fitted.smaller:
                line["smaller"] = dict(fitted.smaller)
            with (
                tempfile.TemporaryDirectory(prefix="kvswap-compare-", dir=self._path) as folder,
                run.method.opened(self.model, Path(folder), fitted, size.context, most) as cache,
            ):
                found = ask_all(
                    self.model, cache, document, self._tokenizer, self.way,
                    lambda: cache.stats().bytes_read,
                )  # fmt: skip
                return line | {"memory_bytes": cache.stats().resident_bytes_peak} | found
        except (BudgetError, ConfigError) as error:
            return line | {"impossible": str(error)}

    def results(self) -> dict[str, Any]:
        """All that the journal has of this comparison; see docs/how-to/compare.md."""
        lines = {tuple(line[name] for name in KEY): line for line in self._journal.lines()}
        methods: dict[tuple[str, str | None], dict[str, Any]] = {}
        for run in self.runs():
            line = lines.get(self._key(run))
            if line is None:
                continue
            mine = methods.setdefault(
                (run.name, run.budget_text),
                {"name": run.name, "budget": run.budget_text, "runs": [], "impossible": {}},
            )
            if "impossible" in line:
                mine["impossible"][str(run.document)] = line["impossible"]
            else:
                found = {name: value for name, value in line.items() if name not in KEY}
                mine["runs"].append({"document": run.document} | found)
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": {
                "name": Path(self.parts.config.name_or_path).name or self.parts.name,
                "digest": self.model_digest,
                "dtype": str(self.parts.dtype).removeprefix("torch."),
            },
            "data": {
                "name": self.questions.path.name,
                "digest": self.questions.digest,
                "documents": len(self.questions),
                "questions": self.questions.questions,
            },
            "accuracy": self.way.accuracy,
            "questions": self.way.questions,
            "new_tokens": self.way.new_tokens,
            "methods": list(methods.values()),
        }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
