"""Runs a plan over one model, a document at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.quality.document import Document, Writer
from bench.quality.methods import FULL, product_settings
from bench.quality.plan import Stretch
from bench.quality.product import Product
from bench.quality.text import Texts
from bench.quality.told import tell
from bench.quality.wording import ReferenceWording, wording_for
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.compare.journal import Journal, digest_of
from kvswap_torch.errors import BudgetError
from kvswap_torch.half_linear import replace_linear
from kvswap_torch.hf.families import config_hash, model_parts
from kvswap_torch.positions import most_positions
from tools.reference_model.place import MODEL as REFERENCE

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """What is asked, of which model.

    Parameters
    ----------
    wording
        ``reference``, ``plain``, ``chat``, or ``auto``: reference for models of its architecture,
        chat for those with a chat template.
    text
        See `Texts`.
    dtype
        The precision the model is run in; None: that of its files.
    """

    model: Path
    tasks: Sequence[str]
    text: str
    seed: int
    wording: str = "auto"
    dtype: torch.dtype | None = None


class Harness:
    """A model, documents and a journal in `folder`."""

    def __init__(self, setting: Setting, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.setting = setting
        dtype = "auto" if setting.dtype is None else setting.dtype
        self.model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype).eval()
        self.has_wide_products = replace_linear(self.model)
        tokenizer = AutoTokenizer.from_pretrained(setting.model)
        self.parts = model_parts(self.model)
        self.wording = _wording(setting.wording, self.model.config, tokenizer)
        texts = Texts(setting.text)
        self.writer = Writer(tokenizer, self.wording, texts, setting.tasks, setting.seed)
        self.digest = self._digest()
        self.journal = Journal(folder / f"{setting.model.resolve().name}-{self.digest}.jsonl")

    def _digest(self) -> str:
        setting, folder = self.setting, self.setting.model
        files = [*folder.glob("*.safetensors"), *folder.glob("tokenizer.json")]
        asked = {
            "tasks": list(setting.tasks),
            "text": setting.text,
            "seed": setting.seed,
            "wording": self.wording.name,
            "dtype": str(self.parts.dtype),
        }
        return digest_of(files, asked)

    def missing(self, plan: Sequence[Stretch]) -> int:
        """Documents times methods that the journal does not have yet."""
        return sum(
            not self.journal.has(stretch.length, document, method)
            for stretch in plan
            for document in range(stretch.documents)
            for method in stretch.methods
        )

    def run(self, plan: Sequence[Stretch], progress: Progress = lambda what: None) -> None:
        """Measures what is missing; each result is in the journal as soon as it is there.

        Parameters
        ----------
        progress
            Called before each step with what is about to be done.
        """
        for stretch in plan:
            for number in range(stretch.documents):
                wanted = [
                    method
                    for method in stretch.methods
                    if not self.journal.has(stretch.length, number, method)
                ]
                if wanted:
                    self._run_document(stretch.length, number, wanted, progress)

    def _run_document(
        self, length: int, number: int, wanted: Sequence[str], progress: Progress
    ) -> None:
        document = self.writer.write(length, number)
        check_length(document, self.parts.config)
        where = f"{length} tokens, document {number + 1}"
        size = Bytes(self.parts, document.longest, tokens=len(document.ids))
        progress(f"{where}: what the full cache tells")
        clock = _Clock()
        told = tell(self.model, document)
        told_seconds = clock.facts()
        for name in wanted:
            progress(f"{where}: {name}")
            line = {
                "length": document.length,
                "document": document.number,
                "tokens": len(document.ids),
                "method": name,
                "full_bytes": size.full,
            }
            if name == FULL:
                found = {"samples": told.scored(document), "memory_bytes": size.full}
                line |= found | told_seconds
            else:
                line |= self._measured(name, document, size, told)
            self.journal.add(line)

    def _measured(self, name: str, document: Document, size: Bytes, told: Any) -> dict[str, Any]:
        """What one method gives, or why no budget allows it."""
        clock = _Clock()
        try:
            product = Product.named(name, product_settings(name), size)
            found = product.run(self.model, document, told)
        except BudgetError as error:
            return {"impossible": str(error)}
        return found | clock.facts()


class _Clock:
    """Seconds since it was made, and those of the processor."""

    def __init__(self) -> None:
        self._began, self._busy = time.perf_counter(), time.process_time()

    def facts(self) -> dict[str, float]:
        passed, busy = time.perf_counter() - self._began, time.process_time() - self._busy
        return {"seconds": round(passed, 2), "cpu_seconds": round(busy, 2)}


def check_length(document: Document, config: Any) -> None:
    """Refuses a document that, with what follows it, is longer than its model was made for.

    Raises
    ------
    ValueError
        With the length that would do.
    """
    most = most_positions(config)
    if most is not None and document.longest > most:
        raise ValueError(
            f"lengths: document and what follows must be at most the {most:,} tokens that the "
            f"model was made for, come to {document.longest:,}; ask for "
            f"{most - document.longest + len(document.ids)}"
        )


def _wording(name: str, config: Any, tokenizer: Any) -> ReferenceWording:
    if name == "auto":
        from transformers import AutoConfig

        reference = AutoConfig.from_pretrained(REFERENCE)
        if config_hash(config) == config_hash(reference):
            name = "reference"
        else:
            name = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    return wording_for(name, tokenizer)
