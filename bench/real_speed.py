"""Milliseconds per token of several settings side by side, on a model that reads a document.

    python -m bench real_speed --model build/models/smollm2 --out real_speed \\
        --methods "product:memory=1/8 product:config=tuned.json,memory=1/8"

Every cache reads the same document; then each decodes a token of its questions in turn, so that
what else the machine does strikes all alike. Methods are written as for `python -m bench quality`;
the first is what the others are compared with, and the full cache (`DynamicCache`) runs beside
them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import DynamicCache

from bench import machine
from bench.quality.methods import parse
from bench.quality.product import Product
from bench.reading import open_held_out, read, step
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.config.engine import engine_value
from kvswap_torch.hf.families import model_parts
from kvswap_torch.tuning.documents import TURNS_MAX

FULL = "full"
WARM = 8  # first steps that do not count


def compare(seconds: dict[str, list[float]], first: str) -> dict[str, dict[str, Any]]:
    """Of each name: median and quartiles in ms, and the median ratio of pairs to `first`."""
    told = {}
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(times, n=4)
        ratios = [mine / other for mine, other in zip(times, seconds[first], strict=True)]
        told[name] = {
            "ms": round(1e3 * middle, 2),
            "quartiles": [round(1e3 * low, 2), round(1e3 * high, 2)],
            "ratio": round(statistics.median(ratios), 3),
        }
    return told


def seconds_of_steps(
    model: Any, caches: dict[str, Any], ids: torch.Tensor, first: int
) -> dict[str, list[float]]:
    """Seconds of each token of ``ids[first:]`` in each cache, after all have read what is before.

    Parameters
    ----------
    ids
        ``[tokens]`` int64.
    """
    for cache in caches.values():
        read(model, cache, ids[:first])
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for token in track(ids[first:], "decoding"):
        for name, cache in caches.items():
            seconds[name].append(step(model, cache, token)[0])
    return {name: times[WARM:] for name, times in seconds.items()}


def open_all(
    stack: ExitStack, model: Any, products: Sequence[Product], context: int, path: Path
) -> dict[str, Any]:
    """The caches of these methods, closed with `stack`."""
    return {
        product.name: stack.enter_context(product.opened(model, path, context))
        for product in products
    }


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")],
    methods: Annotated[str, typer.Option(help="product:..., with spaces between")],
    length: Annotated[int, typer.Option(help="tokens of the document")] = 4096,
    steps: Annotated[int, typer.Option(help="tokens decoded in each cache")] = 128,
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads)
    described = machine.describe(path)
    network, sample = open_held_out(model, length + min(length // 3, TURNS_MAX))
    asked = sample.ids[sample.focus :]
    asked = asked.repeat(-(-(steps + WARM) // len(asked)))[: steps + WARM]
    ids = torch.cat([sample.ids[: sample.focus], asked])
    size = Bytes(model_parts(network), len(ids), path, sample.focus)
    products = [Product.named(name, parse(name)[1], size) for name in methods.split()]
    with ExitStack() as stack:
        caches = open_all(stack, network, products, len(ids), path)
        beside = caches | {FULL: DynamicCache(config=network.config)}
        told = compare(seconds_of_steps(network, beside, ids, sample.focus), products[0].name)
        for product, cache in zip(products, caches.values(), strict=True):
            stats, config = cache.stats(), cache.driver.config
            told[product.name] |= {
                "memory_share": round(stats.resident_bytes_peak / size.full, 4),
                "bytes_read_per_token": round(stats.bytes_read_per_token),
                "hit_rate": stats.hit_rate,
                "ranks": list(cache.driver.ranks),
                "summary_dtype": engine_value(config, "summary_dtype"),
                "groups_max": config.selection.top_k_groups,
                "group_tokens": config.selection.group_tokens,
                "resident_layers": config.memory.resident_layers,
                "device": config.storage.simulated_device or "local disk",
                "smaller": product.smaller,
            }
    Console().print(told)
    if out:
        facts = {"machine": described, "model": model.resolve().name, "tokens": len(ids)}
        machine.write(out, facts | {"threads": threads, "methods": told})


if __name__ == "__main__":
    typer.run(main)
