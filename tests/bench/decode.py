"""Decoding speed: KV on disk against KV in memory and against reading everything back.

    python -m tests.bench.decode --shape 1b --layers 4 --context 32768 --batch 8

Fills caches of one shape with random keys and values (no prefill is needed), then decodes with a
randomly initialised model, one token of each in turn, so that what else the machine does falls on
all alike; medians are reported. Random weights have no locality: two steps choose almost nothing
in common. `--trace` replays the choices of a model that reads (see record_trace.py) instead.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, StaticCache

from kvswap_torch import KVSwapCache, SwapConfig, format_bytes
from tests.bench import machine
from tests.bench.full_restore import FullRestoreCache
from tests.bench.shapes import SHAPES, Shape, make_model

FILL_TOKENS = 2048
SELECTED_TOKENS = 400
MODELLED_BYTES_PER_SECOND = {"nvme": 1.8e9, "ufs": 1.0e9, "emmc": 0.25e9}


def random_keys(shape: Shape, batch: int, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (batch, shape.kv_heads, tokens, shape.head_dim)
    return torch.randn(size, generator=generator, dtype=torch.float32).bfloat16()


def fill(shape: Shape, batch: int, context: int, take: Callable[..., None]) -> None:
    """Calls take(layer, keys, values) with every layer's tokens, a chunk at a time."""
    for layer in range(shape.layers):
        for begin in range(0, context, FILL_TOKENS):
            tokens = min(FILL_TOKENS, context - begin)
            keys = random_keys(shape, batch, tokens, layer * 1_000_003 + begin)
            take(layer, keys, keys.flip(-1))


class Contender:
    """One cache that decodes token by token; `seconds` has one number a step."""

    def __init__(self, name: str, model: Any, cache: Any, batch: int, context: int):
        self.name, self.model, self.cache = name, model, cache
        self.ids = torch.full((batch, 1), 7)
        self.position = context
        self.seconds: list[float] = []
        self.before_step: Callable[[int], None] = lambda step: None

    @torch.inference_mode()
    def step(self) -> None:
        self.before_step(len(self.seconds))
        positions = torch.full_like(self.ids, self.position)
        began = time.perf_counter()
        output = self.model(
            input_ids=self.ids, past_key_values=self.cache, position_ids=positions, use_cache=True
        )
        self.seconds.append(time.perf_counter() - began)
        self.ids = output.logits[:, -1:].argmax(-1)
        self.position += 1

    def median(self, warm_up: int) -> float:
        return statistics.median(self.seconds[warm_up:])

    def close(self) -> None:
        if hasattr(self.cache, "close"):
            self.cache.close()
        self.cache = None
        gc.collect()


def open_kvswap(
    model, shape: Shape, batch: int, context: int, path: Path, config: SwapConfig
) -> Contender:
    cache = KVSwapCache(model, path=path, config=config, max_context=context + 512, max_batch=batch)
    width = shape.kv_heads * shape.head_dim
    rank = cache.driver.ranks[0]
    session = cache.driver.session
    basis = torch.linalg.qr(torch.randn(width, rank, generator=torch.Generator().manual_seed(1)))[0]
    for layer in range(shape.layers):
        session.set_projection(layer, basis, basis)
    fill(shape, batch, context, session.append)
    return Contender("kvswap", model, cache, batch, context)


def open_dynamic(model, shape: Shape, batch: int, context: int) -> Contender:
    cache = DynamicCache(config=model.config)
    fill(shape, batch, context, lambda layer, k, v: cache.update(k, v, layer))
    return Contender("DynamicCache", model, cache, batch, context)


def open_static(model, shape: Shape, batch: int, context: int) -> Contender:
    cache = StaticCache(config=model.config, max_cache_len=context + 512)
    fill(shape, batch, context, lambda layer, k, v: cache.update(k, v, layer))
    return Contender("StaticCache", model, cache, batch, context)


def open_restore(
    model, shape: Shape, batch: int, context: int, path: Path, device: str | None
) -> Contender:
    size = (batch, shape.kv_heads, context, shape.head_dim)
    bandwidth = MODELLED_BYTES_PER_SECOND.get(device) if device else None
    cache = FullRestoreCache(path, shape.layers, size, torch.bfloat16, bandwidth)
    for layer in range(shape.layers):
        chunks: list[torch.Tensor] = []
        fill(replace(shape, layers=1), batch, context, lambda _, k, v, to=chunks: to.append(k))
        keys = torch.cat(chunks, 2)
        cache.fill(layer, keys, keys.flip(-1))
    return Contender("full restore", model, cache, batch, context)


def open_floor(model, shape: Shape, batch: int) -> Contender:
    """The model's own work: a context of as many tokens as are selected."""
    contender = open_dynamic(model, shape, batch, SELECTED_TOKENS)
    contender.name = f"floor ({SELECTED_TOKENS} tokens)"
    return contender


def replay(contender: Contender, trace: dict[str, Any], shape: Shape, batch: int) -> None:
    """Overrides each step's choices by recorded ones; layers and steps go round."""
    steps = trace["steps"]

    def override(step: int) -> None:
        session = contender.cache.driver.session
        for layer in range(shape.layers):
            chosen = []
            for sequence in range(batch):
                recorded = steps[(step + 17 * sequence) % len(steps)]
                chosen.append(recorded[layer % len(recorded)])
            session.override_selection(layer, chosen)

    contender.before_step = override


def time_of_a_token(contender: Contender, steps: int) -> dict[str, float]:
    """Where a token's milliseconds go, from the session's own clocks."""
    counters = contender.cache.stats().counters
    parts = {
        name: 1e3 * (counters[f"{name}_seconds"] - contender.filled[f"{name}_seconds"]) / steps
        for name in ("select", "plan", "wait", "attend", "append")
    }
    parts["predict"] = 1e3 * contender.predict_seconds / steps
    parts["model"] = 1e3 * statistics.mean(contender.seconds) - sum(parts.values())
    return {name: round(value, 3) for name, value in parts.items()}


def watch_prediction(contender: Contender) -> None:
    """Adds up the time of predicting queries, which happens outside the session."""
    predict = contender.cache._look_ahead.predict
    contender.predict_seconds = 0.0
    contender.filled = dict(contender.cache.stats().counters)

    def timed(*args):
        began = time.perf_counter()
        query = predict(*args)
        contender.predict_seconds += time.perf_counter() - began
        return query

    contender.cache._look_ahead.predict = timed


def main(
    shape_name: Annotated[str, typer.Option("--shape", help="1b, small or 8b-layers")] = "1b",
    layers: Annotated[int, typer.Option(help="cut the model to so many layers; 0: all")] = 4,
    context: Annotated[int, typer.Option(help="tokens in the cache")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences")] = 8,
    steps: Annotated[int, typer.Option(help="tokens to decode with each cache")] = 24,
    warm_up: Annotated[int, typer.Option(help="first steps that do not count")] = 4,
    group_tokens: Annotated[int, typer.Option(help="G")] = 4,
    rank: Annotated[int, typer.Option(help="columns of the projection")] = 32,
    pages: Annotated[int, typer.Option(help="reuse buffer, groups per layer and sequence")] = 150,
    path: Annotated[Path, typer.Option(help="folder on the disk to measure")] = Path("."),
    device: Annotated[str, typer.Option(help="modelled device: nvme, ufs, emmc")] = "",
    trace: Annotated[Path | None, typer.Option(help="replay recorded choices")] = None,
    only: Annotated[str, typer.Option(help="contenders, comma-separated")] = (
        "kvswap,static,dynamic,restore,floor"
    ),
    out: Annotated[str, typer.Option(help="name under tests/bench/results; empty: none")] = "",
) -> None:
    setting = Setting(shape_name, layers, context, batch, group_tokens, rank, pages, device or None)
    console = Console()
    contenders = open_contenders(setting, only.split(","), path, console)
    ours = contenders[0] if only.startswith("kvswap") else None
    if ours is not None:
        watch_prediction(ours)
        if trace is not None:
            replay(ours, json.loads(trace.read_text()), setting.shape, batch)
    with console.status("decoding"):
        for _ in range(steps):
            for contender in contenders:
                contender.step()
    results = {
        "machine": machine.describe(path),
        "shape": shape_name,
        "layers": setting.shape.layers,
        "context": context,
        "batch": batch,
        "device": device or "local disk",
        "choices": "random" if trace is None else trace.name,
    } | summarise(contenders, warm_up)
    if ours is not None:
        results["kvswap"] = account(ours, setting, steps)
    _print(console, results)
    if out:
        console.print(f"wrote {machine.write(out, results).name}")
    for contender in contenders:
        contender.close()


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    shape_name: str
    layers: int
    context: int
    batch: int
    group_tokens: int
    rank: int
    pages: int
    device: str | None

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.shape_name]
        return replace(shape, layers=self.layers) if self.layers else shape

    @property
    def config(self) -> SwapConfig:
        groups = SELECTED_TOKENS // self.group_tokens
        return SwapConfig(
            group_tokens=self.group_tokens,
            rank=self.rank // 2,  # doubled by a cache that has no projection file
            groups_max=groups,
            pages_max=max(self.pages, groups),
            select_queries_max=1,
            device_model=self.device,
        )


def open_contenders(
    setting: Setting, names: list[str], path: Path, console: Console
) -> list[Contender]:
    shape, batch, context = setting.shape, setting.batch, setting.context
    model = make_model(shape, context)
    openers = {
        "kvswap": lambda: open_kvswap(model, shape, batch, context, path, setting.config),
        "static": lambda: open_static(model, shape, batch, context),
        "dynamic": lambda: open_dynamic(model, shape, batch, context),
        "restore": lambda: open_restore(model, shape, batch, context, path, setting.device),
        "floor": lambda: open_floor(model, shape, batch),
    }
    contenders = []
    for name in names:
        with console.status(f"filling {name}"):
            contenders.append(openers[name]())
    return contenders


def summarise(contenders: list[Contender], warm_up: int) -> dict[str, Any]:
    """Medians, quartiles, and everybody's time over the first one's."""
    first = contenders[0].median(warm_up)
    return {
        "ms_per_token": {c.name: round(1e3 * c.median(warm_up), 2) for c in contenders},
        "ms_quartiles": {c.name: _quartiles(c, warm_up) for c in contenders},
        "speed_against": {c.name: round(c.median(warm_up) / first, 2) for c in contenders[1:]},
    }


def account(ours: Contender, setting: Setting, steps: int) -> dict[str, Any]:
    """What our cache says of itself."""
    stats, config = ours.cache.stats(), setting.config
    return {
        "config": {"G": config.group_tokens, "rank": setting.rank, "pages_max": config.pages_max},
        "kv_bytes_full": stats.kv_bytes_full,
        "kv_memory_bytes": stats.resident_bytes,
        "memory_share": round(stats.resident_bytes / stats.kv_bytes_full, 4),
        "bytes_read_per_token": round(stats.bytes_read_per_token),
        "hit_rate": stats.hit_rate,
        "time_of_a_token_ms": time_of_a_token(ours, steps),
        "reader": f"{stats.reader}, {stats.io_mode}",
    }


def _quartiles(contender: Contender, warm_up: int) -> list[float]:
    low, _, high = statistics.quantiles(contender.seconds[warm_up:], n=4)
    return [round(1e3 * low, 2), round(1e3 * high, 2)]


def _print(console: Console, results: dict[str, Any]) -> None:
    table = Table(
        title=f"{results['shape']}, {results['layers']} layers, context {results['context']:,}, "
        f"batch {results['batch']}, {results['device']}, choices {results['choices']}"
    )
    for column in ("cache", "ms per token", "quartiles", "time against kvswap"):
        table.add_column(column)
    for name, value in results["ms_per_token"].items():
        ratio = results["speed_against"].get(name)
        table.add_row(
            name,
            f"{value:.1f}",
            "{:.1f} - {:.1f}".format(*results["ms_quartiles"][name]),
            "" if ratio is None else f"{ratio:.2f} x",
        )
    console.print(table)
    ours = results.get("kvswap")
    if ours:
        console.print(
            f"KV memory {format_bytes(ours['kv_memory_bytes'])} of "
            f"{format_bytes(ours['kv_bytes_full'])} ({ours['memory_share']:.1%}), "
            f"{format_bytes(ours['bytes_read_per_token'])} read per token, "
            f"hit rate {ours['hit_rate']:.1%}, {ours['reader']}"
        )
        console.print("a token's ms: " + json.dumps(ours["time_of_a_token_ms"]))


if __name__ == "__main__":
    typer.run(main)
