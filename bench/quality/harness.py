"""Runs a plan over one model, a document at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.quality import measure
from bench.quality.budget import Bytes
from bench.quality.document import Document, Writer
from bench.quality.emulate import Emulation
from bench.quality.journal import Journal, digest_of
from bench.quality.methods import Resolved, Resolver
from bench.quality.plan import Stretch
from bench.quality.product import Product
from bench.quality.projections import Projections
from bench.quality.text import Texts
from bench.quality.wording import ReferenceWording, wording_for
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.half_linear import replace_linear
from kvswap_torch.hf.families import config_hash, model_parts
from kvswap_torch.positions import most_positions

REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference_model"
CONFIG = "kvswap.json"
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
    fitted: tuple[int, ...] = (2048, 4096, 2048, 4096)


class Harness:
    """A model, its config, documents and journal.

    Parameters
    ----------
    folder
        For the journal and fitted projections.
    """

    def __init__(self, setting: Setting, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.setting = setting
        dtype = "auto" if setting.dtype is None else setting.dtype
        self.model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype).eval()
        self.has_wide_products = replace_linear(self.model)
        tokenizer = AutoTokenizer.from_pretrained(setting.model)
        self.parts = model_parts(self.model)
        self.config = load_config(setting.model)
        if setting.dtype is None:  # otherwise the config may well be for another precision
            self.config.check_model(self.parts.identity)
        self.wording = _wording(setting.wording, self.model.config, tokenizer)
        texts = Texts(setting.text)
        self.writer = Writer(tokenizer, self.wording, texts, setting.tasks, setting.seed)
        self.digest = self._digest()
        self.journal = Journal(folder / f"{setting.model.resolve().name}-{self.digest}.jsonl")
        self._folder = folder / f"projections-{self.digest}"

    def _digest(self) -> str:
        setting, folder = self.setting, self.setting.model
        files = [*folder.glob("*.safetensors"), *folder.glob("tokenizer.json")]
        files += [folder / CONFIG] if (folder / CONFIG).exists() else []
        asked = {
            "tasks": list(setting.tasks),
            "text": setting.text,
            "seed": setting.seed,
            "wording": self.wording.name,
            "dtype": str(self.parts.dtype),
            "fitted": setting.fitted,
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
        projections = Projections(
            self.model,
            self.parts,
            self.config,
            self.writer,
            self._folder,
            lambda what, done, total: progress(f"{what}, {done} of {total}"),
            self.setting.fitted,
        )
        for stretch in plan:
            for number in range(stretch.documents):
                wanted = [
                    method
                    for method in stretch.methods
                    if not self.journal.has(stretch.length, number, method)
                ]
                if wanted:
                    self._run_document(stretch.length, number, wanted, projections, progress)

    def _resolve(
        self, resolver: Resolver, document: Document, names: Sequence[str]
    ) -> list[Resolved]:
        """The methods; those that no budget allows are noted in the journal instead."""
        methods = []
        for name in names:
            try:
                methods.append(resolver.resolve(name))
            except BudgetError as error:
                self.journal.add(_impossible(document, name, str(error)))
        return methods

    def _run_document(self, length, number, wanted, projections, progress) -> None:
        document = self.writer.write(length, number)
        check_length(document, self.parts.config)
        where = f"{length} tokens, document {number + 1}"
        size = Bytes(self.model, self.parts.shape, len(document.ids))
        # Projections are fitted here: the model must not be under emulation then.
        resolver = Resolver(self.config, size, projections)
        methods = self._resolve(resolver, document, wanted)
        progress(f"{where}: reading")
        with Emulation(self.model) as emulation:
            began = time.process_time()
            past = emulation.read(document.ids)
            reading = time.process_time() - began
            progress(f"{where}: what the full cache tells")
            document = measure.written(emulation, past, document)
            told = measure.tell(emulation, past, document)
            for method in methods:
                if not isinstance(method.method, Product):
                    self._measure(
                        document,
                        method,
                        size,
                        reading,
                        progress,
                        lambda method=method: measure.run(emulation, past, document, method, told),
                    )
        # The product puts its own attention on the model, which must not be emulating then.
        for method in methods:
            if isinstance(method.method, Product):
                self._measure(
                    document,
                    method,
                    size,
                    reading,
                    progress,
                    lambda method=method: method.method.run(self.model, document, told),
                )

    def _measure(self, document, method, size: Bytes, reading: float, progress, run) -> None:
        """One method on one document, into the journal."""
        progress(f"{document.length} tokens, document {document.number + 1}: {method.name}")
        began = time.process_time()
        try:
            results = run()
        except BudgetError as error:
            self.journal.add(_impossible(document, method.name, str(error)))
            return
        seconds = time.process_time() - began
        self.journal.add(
            _line(document, method, size)
            | {"cpu_seconds": round(seconds, 2), "cpu_seconds_reading": round(reading, 2)}
            | results
        )


def check_length(document: Document, config: Any) -> None:
    """Refuses a document that, with what follows it, is longer than its model was made for.

    Raises
    ------
    ValueError
        With the length that would do.
    """
    most = most_positions(config)
    follows = max(len(sample.ids) + sample.to_write for sample in document.samples)
    if most is not None and len(document.ids) + follows > most:
        raise ValueError(
            f"lengths: document and what follows must be at most the {most:,} tokens that the "
            f"model was made for, come to {len(document.ids) + follows:,}; ask for {most - follows}"
        )


def _impossible(document: Document, name: str, why: str) -> dict[str, Any]:
    return {
        "length": document.length,
        "document": document.number,
        "method": name,
        "impossible": why,
    }


def _line(document: Document, method: Resolved, size: Bytes) -> dict[str, Any]:
    return {
        "length": document.length,
        "document": document.number,
        "tokens": len(document.ids),
        "method": method.name,
        "memory_bytes": method.memory_bytes,
        "summary_bytes": method.summary_bytes,
        "full_bytes": size.full,
        "record_bytes": method.record_bytes,
        "layers_read": size.shape.layers,
        "ranks": None if method.frame is None else list(method.config.ranks(size.shape.layers)),
        "summary_dtype": None if method.frame is None else method.config.summary_dtype,
        "groups_max": None if method.frame is None else method.frame.groups_max,
        "group_tokens": None if method.frame is None else method.frame.group_tokens,
    }


def load_config(folder: Path) -> SwapConfig:
    """The kvswap.json beside a model; without one, what the cache does when nobody calibrated."""
    path = folder / CONFIG
    return SwapConfig.load(path) if path.exists() else SwapConfig()


def _wording(name: str, config: Any, tokenizer: Any) -> ReferenceWording:
    if name == "auto":
        from transformers import AutoConfig

        reference = AutoConfig.from_pretrained(REFERENCE)
        if config_hash(config) == config_hash(reference):
            name = "reference"
        else:
            name = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    return wording_for(name, tokenizer)
