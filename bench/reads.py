"""What methods read of the disk for a token: bytes, requests, and how long a modelled disk takes.

    python -m bench reads --device emmc \\
        --methods "product:group_tokens=8,groups_max=50 dynakv:groups_max=50"

A prompt is read, and the text that follows it comes token by token, teacher-forced, in a cache of
each method; they are written as for `python -m bench quality`. Bytes and requests are counted from
the prompt on. *device_ms*: how long the modelled disk reads for a token, whatever the processor
does meanwhile, of the steps that the timeline still has. So what else the machine does changes none
of these figures, and step times are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from bench import machine
from bench.long_decode import text_of
from bench.quality.harness import REFERENCE
from bench.quality.methods import product_settings
from bench.quality.product import Product
from bench.reading import read, step
from kvswap_torch import KVSwapCache
from kvswap_torch.cli.load import load_model
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.timeline import Timeline

SPANS = 1 << 17  # kept of a modelled device: those of some hundred steps


def covered_ns(stretches: Iterable[tuple[int, int]]) -> int:
    """What any of them covers, each ``(begin, end)``."""
    total, until = 0, 0
    for begin, end in sorted(stretches):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def device_ms(timeline: Timeline) -> float | None:
    """How long the disk reads for a step; None where no step was recorded as a whole."""
    steps = timeline.steps()
    if not steps:
        return None
    begin, end = steps[0][0].begin_ns, steps[-1][-1].end_ns
    reads = [span for span in timeline.spans if span.name == "read"]
    within = [(span.begin_ns, span.end_ns) for span in reads if begin <= span.begin_ns < end]
    return 1e-6 * covered_ns(within) / len(steps)


def opened(product: Product, model: Any, path: Path, context: int, device: str) -> KVSwapCache:
    """A method's cache on a modelled disk, with a timeline, in the settings that it has without."""
    with product.opened(model, path, context) as own:
        config = own.driver.config.with_settings({"storage.simulated_device": device})
    return KVSwapCache(model, path, config, max_context=context, max_batch=1, timeline_spans=SPANS)


def follow(model: Any, cache: KVSwapCache, ids: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Reads the prompt of `ids` ``[tokens]``, decodes the rest, and tells what was read for it."""
    read(model, cache, ids[:prompt])
    begun = cache.stats().counters
    for token in track(ids[prompt:], "decoding"):
        step(model, cache, token)
    now = cache.stats().counters

    def since(name: str) -> float:
        return now[name] - begun[name]

    steps, requests = len(ids) - prompt, max(1.0, since("reads"))
    tokens = float(cache.driver.config.selection.group_tokens)
    if "clusters" in now:
        tokens = now["tokens_a_cluster"] / max(1.0, now["pages_a_cluster"])
    selected = since("groups_attended")
    ms = device_ms(cache.stats(timeline=True).timeline)
    return {
        "bytes": round(since("bytes_read") / steps),
        "requests": round(since("reads") / steps, 1),
        "tokens_a_request": round(tokens * since("records_read") / requests, 1),
        "found_in_memory": round(1 - since("groups_loaded") / selected, 3) if selected else None,
        "device_ms": None if ms is None else round(ms, 2),
    }


def main(
    methods: Annotated[str, typer.Option(help="product:..., with spaces between")],
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    prompt: Annotated[int, typer.Option(help="tokens that are read before")] = 4096,
    steps: Annotated[int, typer.Option(help="tokens decoded")] = 96,
    device: Annotated[str, typer.Option(help="modelled: nvme, ufs, emmc")] = "emmc",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    seed: Annotated[int, typer.Option(help="of the text")] = 0,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="absolute path of a results file; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads)
    described, network = machine.describe(path), load_model(str(model))
    ids = text_of(model, prompt + steps, seed)
    size = Bytes(model_parts(network), len(ids), path)
    told: dict[str, Any] = {}
    for name in methods.split():
        try:
            product = Product.named(name, product_settings(name), size)
            with opened(product, network, path, len(ids), device) as cache:
                told[name] = follow(network, cache, ids, prompt)
        except BudgetError as error:
            told[name] = {"impossible": str(error)}
        Console(width=200).print(name, told[name])
    facts = {"machine": described, "model": model.resolve().name, "device": device}
    if out:
        machine.write(out, facts | {"prompt": prompt, "steps": steps, "methods": told})


if __name__ == "__main__":
    typer.run(main)
