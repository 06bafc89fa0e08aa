"""What clusters' adaptation takes of a step, at any shape and length, without reading a prompt.

    python -m bench.adaptation --shape 1b --context 32768 --batch 8 --out adaptation_1b_32k_b8

A cache of clusters is filled with keys like those that the model's random weights make of random
text: keys of a window of it, drawn again with noise, so that they have something to be alike in and
what is decoded is like them. Then tokens are decoded, a random one of each sequence at a time.
Adaptation is assigning tokens to clusters, splitting, packing, and reading what tokens wait for.
Groups leave the tail all at once, in one step of `--group-tokens`: shares are of as many steps.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

from bench import machine
from bench.clustering import kinds
from bench.contenders import FILL_TOKENS
from bench.shapes import SHAPES, Shape, make_model
from kvswap_torch import KVSwapCache, SwapConfig

WINDOW = 1024  # tokens whose keys are drawn again
NOISE = 0.5  # of the keys' standard deviation
VOCABULARY = 4096
COLUMNS = ("who waits", "ms a step", "of it adaptation", "fill, s", "of it clustering")
COLUMNS += ("clusters, tokens of one", "splits a step", "read for who waits, a step")


@torch.inference_mode()
def window_of(network: Any, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of random text before position `context`: [kv_heads, tokens, head_dim]."""
    tokens = min(WINDOW, context)
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(2))
    cache = DynamicCache(config=network.config)
    positions = torch.arange(context - tokens, context)[None]
    network(input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def drawn(
    window: tuple[torch.Tensor, torch.Tensor], batch: int, context: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A layer's keys and values, a chunk at a time: [batch, kv_heads, tokens, head_dim] each."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = window
    noise = NOISE * float(keys.float().std())
    for begin in range(0, context, FILL_TOKENS):
        count = min(FILL_TOKENS, context - begin)
        picked = torch.randint(keys.shape[1], (batch, count), generator=generator)
        some = keys[:, picked].transpose(0, 1)
        apart = torch.randn(some.shape, generator=generator).mul_(noise).to(some.dtype)
        yield some + apart, values[:, picked].transpose(0, 1).contiguous()


@torch.inference_mode()
def decode(
    network: Any, cache: KVSwapCache, batch: int, context: int, steps: int
) -> Iterator[tuple[float, float]]:
    """Seconds of each step, and those of it that adaptation took."""
    generator = torch.Generator().manual_seed(3)
    session = cache.driver.session
    for step in track(range(steps), "decoding"):
        ids = torch.randint(VOCABULARY, (batch, 1), generator=generator)
        positions = torch.full_like(ids, context + step)
        before = session.counters()["cluster_seconds"]
        began = time.perf_counter()
        network(input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        seconds = time.perf_counter() - began
        yield seconds, session.counters()["cluster_seconds"] - before


def shares(times: list[tuple[float, float]], group_tokens: int) -> list[float]:
    """Of adaptation, of each stretch of steps in which a group leaves the tail."""
    found = []
    for begin in range(0, len(times) - group_tokens + 1, group_tokens):
        whole, adapting = map(sum, zip(*times[begin : begin + group_tokens], strict=True))
        found.append(adapting / whole)
    return found


def measured(
    network: Any,
    shape: Shape,
    config: SwapConfig,
    *,
    batch: int,
    context: int,
    steps: int,
    path: Path,
) -> dict[str, Any]:
    """What one cache takes."""
    most = {"max_context": context + steps, "max_batch": batch}
    with KVSwapCache(network, path, config, **most) as cache:
        session = cache.driver.session
        began = time.perf_counter()
        for layer, window in enumerate(track(window_of(network, context), "filling")):
            for keys, values in drawn(window, batch, context, layer):
                session.append(layer, keys, values)
        fill_seconds = time.perf_counter() - began
        filled = dict(session.counters())
        times = list(decode(network, cache, batch, context, steps))
        counters = cache.stats().counters
        told = shares(times, config.group_tokens)
        low, middle, high = statistics.quantiles(told, n=4) if len(told) > 1 else 3 * told
        return {
            "pending_tokens": config.pending_tokens,
            "ms": round(1e3 * statistics.median(whole for whole, _ in times), 2),
            "mean_ms": round(1e3 * statistics.mean(whole for whole, _ in times), 2),
            "adaptation_ms": round(1e3 * statistics.mean(adapting for _, adapting in times), 3),
            "share": round(middle, 4),
            "share_quartiles": [round(low, 4), round(high, 4)],
            "fill_seconds": round(fill_seconds, 1),
            "fill_clustering_seconds": round(filled["cluster_seconds"], 1),
            "clusters": round(counters["clusters"]),
            "tokens_a_cluster": round(counters["tokens_a_cluster"], 1),
            **{
                name: round((counters[name] - filled[name]) / steps, 2)
                for name in ("cluster_splits", "cluster_splits_forced", "cluster_records_read")
            },
            "memory_bytes": cache.stats().resident_bytes,
        }


def line(told: dict[str, Any]) -> list[str]:
    low, high = told["share_quartiles"]
    return [
        str(told["pending_tokens"]),
        f"{told['mean_ms']:.1f}",
        f"{told['adaptation_ms']:.2f} ms, {told['share']:.1%} ({low:.1%} to {high:.1%})",
        f"{told['fill_seconds']:.0f}",
        f"{told['fill_clustering_seconds']:.0f}",
        f"{told['clusters']}, {told['tokens_a_cluster']}",
        f"{told['cluster_splits']:.1f}",
        f"{told['cluster_records_read']:.1f}",
    ]


def main(
    shape_name: Annotated[str, typer.Option("--shape", help="1b, small, 8b-layers")] = "1b",
    layers: Annotated[int, typer.Option(help="cut the model to so many layers; 0: all")] = 0,
    context: Annotated[int, typer.Option(help="tokens in the cache")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences")] = 8,
    steps: Annotated[int, typer.Option(help="tokens to decode of each")] = 48,
    group_tokens: Annotated[int, typer.Option(help="of a group, and of a cluster's page")] = 8,
    heads: Annotated[str, typer.Option(help="who chooses: all KV heads, or each")] = "all",
    waiting: Annotated[str, typer.Option(help="pending_tokens of each cache, by ,")] = "16",
    device: Annotated[str, typer.Option(help="modelled device: nvme, ufs, emmc")] = "",
    threads: Annotated[int, typer.Option(help="of torch; 0: as it is")] = 0,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    if threads:
        torch.set_num_threads(threads)
    described = machine.describe(path)
    shape = SHAPES[shape_name]
    shape = dataclasses.replace(shape, layers=layers or shape.layers)
    network = make_model(shape, context + steps)
    config = dict(kinds(group_tokens, heads))["clusters, 16 wait"]
    rows = []
    for count in waiting.split(","):
        made = dataclasses.replace(config, pending_tokens=int(count), device_model=device or None)
        size = {"batch": batch, "context": context, "steps": steps}
        rows.append(measured(network, shape, made, **size, path=path))
    title = f"{shape_name}, {shape.layers} layers, {context:,} tokens, batch {batch}"
    table = Table(*COLUMNS, title=f"{title}, {device or 'local disk'}, heads {heads}")
    for told in rows:
        table.add_row(*line(told))
    console = Console(width=150)
    console.print(table)
    if out:
        facts = {"machine": described, "shape": shape_name, "layers": shape.layers}
        facts |= {"context": context, "batch": batch, "steps": steps, "heads": heads}
        facts |= {"group_tokens": group_tokens, "device": device or "local disk"}
        facts |= {"threads": torch.get_num_threads(), "rows": rows}
        console.print(f"wrote {machine.write(out, facts).name}")


if __name__ == "__main__":
    typer.run(main)
