"""The product itself on the harness's documents: `KVSwapCache`, its disk and its own defaults.

A method is written
``product:memory=1/8,score=mass``: `memory` is the share of the full cache given as
``kv_memory_bytes``, `config` a file, `preset` a published system, and any other setting one of
`SwapConfig`. Every preset but the default is a family of its own: ``quest:memory=1/8``. A preset
keeps its columns; where they do not fit, it takes the smaller settings that it has for that.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.quality.document import Document, Sample
from bench.quality.heads import stored_heads
from bench.quality.told import Told, score_sample
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.config import PATHS, SwapConfig
from kvswap_torch.config.engine import NAMES, engine_value, renamed
from kvswap_torch.preset import find

if TYPE_CHECKING:
    from kvswap_torch import KVSwapCache

CHUNK = 4096  # tokens of the document per forward pass
OWN = ("memory", "config", "question", "preset")
CHANGED = (*NAMES, *PATHS)  # settings by their paths, or by the engine's names
# How groups come to be in memory, whichever are selected: of the defaults nothing else changes.
HOW_READ = ("prefetch.mode", "storage.simulated_device")


def _setting(key: str, value: Any) -> tuple[str, Any]:
    return renamed(key, value) if key in NAMES else (key, value)


QUESTIONS = ("after", "inside")


@dataclasses.dataclass(frozen=True)
class Product:
    """A cache to open for each document.

    Parameters
    ----------
    config
        None: the cache's own defaults, or the preset's.
    budget_bytes
        ``kv_memory_bytes``; None: no limit.
    question
        ``after``: a question is one chunk, which attends exactly when it is longer than
        ``select_queries_max``. ``inside``: token by token, under selection, as if it stood in the
        text.
    preset
        One that divides a budget itself, in the place of a config.
    smaller
        What a preset's settings are in the budget, where its own do not fit.
    read_by
        Of `HOW_READ`, what is changed of the cache's own defaults, which are as long as they were.
    """

    name: str
    config: SwapConfig | None
    budget_bytes: int | None
    question: str
    preset: str | None = None
    smaller: dict[str, Any] = dataclasses.field(default_factory=dict)
    read_by: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def named(cls, name: str, settings: dict[str, str], size: Bytes) -> Product:
        """By the settings of a method's name.

        Raises
        ------
        ValueError
            For a question that is neither after nor inside.
        BudgetError
            For a preset whose summary alone is too large.
        """
        question = settings.get("question", "after")
        if question not in QUESTIONS:
            raise ValueError(f"question: must be after or inside, got {question!r}")
        file = settings.get("config")
        config = None if file is None else SwapConfig.load(Path(file))
        changed = dict(
            _setting(key, _value(text)) for key, text in settings.items() if key in CHANGED
        )
        budget = size.share(settings["memory"]) if "memory" in settings else None
        if "preset" in settings:
            if find(settings["preset"]).divides and not changed:
                return cls(name, None, budget, question, settings["preset"])
            if find(settings["preset"]).needs:
                changed = stored_heads(size.identity) | changed
            fitted = size.of_preset(settings["preset"], changed, budget)
            return cls(name, fitted.config, budget, question, smaller=dict(fitted.smaller))
        if changed and file is None and set(changed) <= set(HOW_READ):
            return cls(name, None, budget, question, read_by=changed)
        if changed:
            config = (config or SwapConfig()).with_settings(changed)
        return cls(name, config, budget, question)

    def opened(self, model: Any, path: str | Path, context: int) -> KVSwapCache:
        """Its cache for one sequence of so many tokens; the caller closes it."""
        if not self.read_by:
            return self._opened(model, path, context, self.config)
        with self._opened(model, path, context, self.config) as own:
            config = own.driver.config.with_settings(self.read_by)
        return self._opened(model, path, context, config)

    def _opened(
        self, model: Any, path: str | Path, context: int, config: SwapConfig | None
    ) -> KVSwapCache:
        from kvswap_torch import KVSwapCache

        return KVSwapCache(
            model,
            path=path,
            config=config,
            preset=self.preset,
            kv_memory_bytes=self.budget_bytes,
            max_context=context,
            max_batch=1,
        )

    @torch.inference_mode()
    def run(self, model: Any, document: Document, told: Told) -> dict[str, Any]:
        """Lets every sample follow the document; scored beside what the full cache tells."""
        with (
            tempfile.TemporaryDirectory() as folder,
            self.opened(model, folder, document.longest) as cache,
        ):
            for ids in document.ids.split(CHUNK):
                model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1)
            samples = [
                score_sample(sample, self._rows(model, cache, sample), told.rows[number])
                for number, sample in enumerate(document.samples)
            ]
            return {"samples": samples} | self.facts(cache)

    def facts(self, cache: KVSwapCache) -> dict[str, Any]:
        """What its cache held and read, and its settings."""
        stats, config = cache.stats(), cache.driver.config
        return {
            "memory_bytes": stats.resident_bytes_peak,
            "bytes_read_per_token": round(stats.bytes_read_per_token),
            "hit_rate": stats.hit_rate,
            "groups_per_step": float(config.selection.top_k_groups),
            "groups_max": config.selection.top_k_groups,
            "group_tokens": config.selection.group_tokens,
            "ranks": list(cache.driver.ranks),
            "summary_dtype": engine_value(config, "summary_dtype"),
            "smaller": self.smaller,
            "prefetch": config.prefetch.mode,
        }

    def _rows(self, model: Any, cache: Any, sample: Sample) -> torch.Tensor:
        """Logits of the rows that predict the answers' tokens; the cache is as before."""
        before = cache.get_seq_length()
        rows, fed = [], 0
        for begin, end in sample.answers:
            # The last answer's end token is never read.
            asked = sample.ids[fed:begin]
            for chunk in asked.split(len(asked) if self.question == "after" else 1):
                last = self._step(model, cache, chunk)
            rows.append(last)
            for place in range(begin, end - 1):
                rows.append(self._step(model, cache, sample.ids[place : place + 1]))
            fed = end - 1
        cache.crop(before - cache.get_seq_length())
        return torch.stack(rows)

    def _step(self, model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1)
        return output.logits[0, -1].float()


def _value(text: str) -> Any:
    """A setting as JSON would have it; ``4+4+32`` is a list, such as one rank a layer."""
    if "+" in text:
        return tuple(json.loads(part) for part in text.split("+"))
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
