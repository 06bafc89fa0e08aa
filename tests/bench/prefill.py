"""Prefill time with the cache on disk against `DynamicCache`, in turn, medians.

    python -m tests.bench.prefill --shape 1b --layers 4 --tokens 8192

The cache has no projection file, so the time includes estimating one from the prompt.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import DynamicCache

from kvswap_torch import KVSwapCache
from tests.bench import machine
from tests.bench.shapes import SHAPES, make_model


@torch.inference_mode()
def seconds_of(model: Any, cache: Any, ids: torch.Tensor) -> float:
    began = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - began


def main(
    shape_name: Annotated[str, typer.Option("--shape", help="1b, small or 8b-layers")] = "1b",
    layers: Annotated[int, typer.Option(help="cut the model to so many layers; 0: all")] = 4,
    tokens: Annotated[int, typer.Option(help="length of the prompt")] = 8192,
    rounds: Annotated[int, typer.Option(help="prefills with each cache")] = 5,
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("."),
    out: Annotated[str, typer.Option(help="name under tests/bench/results; empty: none")] = "",
) -> None:
    shape = SHAPES[shape_name]
    shape = replace(shape, layers=layers) if layers else shape
    model = make_model(shape, tokens)
    ids = torch.randint(4096, (1, tokens), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {"DynamicCache": [], "kvswap": []}
    estimate = 0.0
    for _ in range(rounds + 1):
        seconds["DynamicCache"].append(seconds_of(model, DynamicCache(config=model.config), ids))
        with KVSwapCache(model, path=path) as cache:
            seconds["kvswap"].append(seconds_of(model, cache, ids))
            estimate = cache.stats().estimate_seconds
    # The first round warms up allocators and threads.
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    pairs = zip(seconds["kvswap"][1:], seconds["DynamicCache"][1:], strict=True)
    results = {
        "machine": machine.describe(path),
        "shape": shape_name,
        "layers": shape.layers,
        "tokens": tokens,
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "ratio_of_pairs": round(statistics.median(a / b for a, b in pairs), 3),
        "estimate_seconds": round(estimate, 3),
    }
    Console().print(results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
