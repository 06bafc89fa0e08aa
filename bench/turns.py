"""A document, then a question about it: prefill, and time to the first token of the second turn.

    python -m bench turns --shape 1b --tokens 8192 --out turns_1b_8k

The question comes as one pass, as generate() feeds it; a chunk that long attends exactly, so kvswap
reads the whole document back for it. Against it: `DynamicCache` that has held the document in
memory, and a prefill of document and question together. kvswap holds what side_by_side gives it
(a 13th of the KV, or the least it needs) and estimates its projection from the document.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import DynamicCache

from bench import machine
from bench.contenders import ROOM_TOKENS
from bench.shapes import Shape, make_model
from bench.side_by_side.plan import Cell
from bench.side_by_side.settings import Fitted, fit_kvswap
from kvswap_torch import KVSwapCache


@torch.inference_mode()
def seconds_of(model: Any, cache: Any, ids: torch.Tensor) -> float:
    """One pass over `ids`, to the logits of its last token."""
    began = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - began


class Rounds:
    """Seconds of each thing measured, one number a round."""

    def __init__(self, model: Any, document: torch.Tensor, question: torch.Tensor):
        self.model, self.document, self.question = model, document, question
        self.prefill: dict[str, list[float]] = {"DynamicCache": [], "kvswap": []}
        self.second: dict[str, list[float]] = {"recomputed": [], "DynamicCache": [], "kvswap": []}
        self.estimate_seconds = 0.0
        self.kv_memory_bytes = 0

    def take(self, path: Path, fitted: Fitted) -> None:
        """One of each, in turn."""
        context = self.document.shape[1] + ROOM_TOKENS
        self._two_turns("DynamicCache", DynamicCache(config=self.model.config))
        with KVSwapCache(
            self.model,
            path=path,
            config=fitted.config,
            kv_memory_bytes=fitted.budget_bytes,
            max_context=context,
            max_batch=1,
        ) as cache:
            self._two_turns("kvswap", cache)
            stats = cache.stats()
            self.estimate_seconds = stats.estimate_seconds
            self.kv_memory_bytes = stats.resident_bytes_peak
        both = torch.cat([self.document, self.question], 1)
        fresh = DynamicCache(config=self.model.config)
        self.second["recomputed"].append(seconds_of(self.model, fresh, both))

    def _two_turns(self, name: str, cache: Any) -> None:
        self.prefill[name].append(seconds_of(self.model, cache, self.document))
        self.second[name].append(seconds_of(self.model, cache, self.question))

    def results(self, shape: Shape) -> dict[str, Any]:
        """Medians; the first round warms up allocators and threads."""
        ours, theirs = self.prefill["kvswap"][1:], self.prefill["DynamicCache"][1:]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        tokens = self.document.shape[1]
        return {
            "layers": shape.layers,
            "tokens": tokens,
            "question_tokens": self.question.shape[1],
            "prefill_seconds": _medians(self.prefill),
            "prefill_ratio_of_pairs": round(ratio, 3),
            "estimate_seconds": round(self.estimate_seconds, 3),
            "second_turn_seconds": _medians(self.second),
            "second_turn_quartiles": _quartiles(self.second),
            "kv_memory_bytes": self.kv_memory_bytes,
            "memory_share": round(self.kv_memory_bytes / shape.kv_bytes(1, tokens), 4),
        }


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(times[1:]), 4) for name, times in seconds.items()}


def _quartiles(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    cuts = {name: statistics.quantiles(times[1:], n=4) for name, times in seconds.items()}
    return {name: [round(low, 4), round(high, 4)] for name, (low, _, high) in cuts.items()}


def main(
    shape_name: Annotated[
        str, typer.Option("--shape", help="1b (4 layers), small, 8b-layers")
    ] = "1b",
    tokens: Annotated[int, typer.Option(help="length of the document")] = 8192,
    question: Annotated[int, typer.Option(help="length of the question, tokens")] = 64,
    rounds: Annotated[int, typer.Option(help="that count; at least 2")] = 3,
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    if rounds < 2:
        raise typer.BadParameter(f"rounds: must be at least 2, for a spread, got {rounds}")
    cell = Cell(shape_name, tokens, batch=1)
    shape = cell.shape
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    described = machine.describe(path)
    model = make_model(shape, tokens)
    ids = torch.randint(4096, (1, tokens + question), generator=torch.Generator().manual_seed(0))
    fitted = fit_kvswap(model, cell, path)
    measured = Rounds(model, ids[:, :tokens], ids[:, tokens:])
    console = Console()
    for number in range(rounds + 1):
        with console.status(f"round {number} of {rounds}"):
            measured.take(path, fitted)
    results = {"machine": described, "shape": shape_name} | measured.results(shape)
    console.print(results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
