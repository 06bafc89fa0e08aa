"""What clusters cost while a text goes on: a prompt, then a token at a time, caches in turn.

    python -m bench.clustering --steps 2048 --out clustering
    python -m bench.clustering --shape small --kv-heads 8 --heads each --device emmc \\
      --only "groups;clusters, 16 wait;pools" --out pools_random_8_each_emmc

A model reads a prompt and follows the same text token by token in each cache, whose clusters grow
and split meanwhile: clusters that wait for more or fewer tokens before pages are written anew,
static and local ones (`cluster_update`), `replacement=clusters` beside `lru`, clusters in pools,
and KVSwap's groups of as many tokens as a page of theirs has, of 4, and of 16. What else the
machine does falls on all alike. With `--shape` weights and text are random: what is chosen then has
no likeness from step to step. `--kv-heads` of a model changes nothing of what it computes
(`bench.kv_heads`).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.kv_heads import with_kv_heads
from bench.reading import REFERENCE, open_held_out, read, step_seconds
from bench.shapes import SHAPES, make_model
from kvswap_torch import KVSwapCache, SwapConfig, format_bytes

WARM = 16  # first steps that do not count
TOKENS = 400  # attended by each
OTHER_GROUPS = (4, 16)  # tokens of a group: clusters are beside those of several sizes
SPANS, SPAN_BYTES = 1 << 19, 40  # of time that are kept of a modelled device: those of all steps
COLUMNS = ("cache", "ms a token", "of the first", "clustering", "read, requests a token")
COLUMNS += ("tokens a read", "written", "clusters", "tokens of one", "splits", "forced reads")


def kinds(group_tokens: int, heads: str = "all") -> Iterator[tuple[str, SwapConfig]]:
    """What is compared, by name; the first is what the others are compared with."""
    groups = TOKENS // group_tokens
    common = {"group_tokens": group_tokens, "groups_max": groups, "pages_max": 2 * groups}
    common["heads"] = heads
    runs = SwapConfig(score="mass", rank=16, replacement="lru", **common)
    clusters = SwapConfig(grouping="clusters", rows="centroid", replacement="lru", **common)
    yield "groups", runs
    for other in OTHER_GROUPS:
        sizes = {"groups_max": TOKENS // other, "pages_max": 2 * TOKENS // other}
        yield f"G = {other}", dataclasses.replace(runs, group_tokens=other, **sizes)
    for waiting in (0, 16, 64):
        changed = dataclasses.replace(clusters, pending_tokens=waiting)
        yield f"clusters, {waiting} wait", changed
    yield "clusters, replacement=clusters", dataclasses.replace(clusters, replacement="clusters")
    for update in ("static", "local"):
        yield f"clusters, {update}", dataclasses.replace(clusters, cluster_update=update)
    # As other systems have them: no size makes one full.
    boundless = {"cluster_update": "static", "cluster_tokens_max": 4096}
    yield "clusters, static of any size", dataclasses.replace(clusters, **boundless)
    for slack in (0, 2, 4):
        changed = dataclasses.replace(clusters, layout="pools", pool_slack_pages=slack)
        yield f"pools, slack {slack}", changed


def wanted(kinds: Iterator[tuple[str, SwapConfig]], only: str) -> Iterator[tuple[str, SwapConfig]]:
    """Those whose name begins as one of `only`; empty: all."""
    starts = [start.strip() for start in only.split(";") if start.strip()]
    for name, config in kinds:
        if not starts or any(name.startswith(start) for start in starts):
            yield name, config


class Follower:
    """One cache, its step times, and what it has counted since the prompt."""

    def __init__(self, name: str, cache: KVSwapCache, group_tokens: int, spans: int = 0):
        self.name, self.cache, self.group_tokens = name, cache, group_tokens
        self.spans = spans  # of time, which the cache keeps
        self.seconds: list[float] = []
        self.device_ms: float | None = None
        self.prompt_seconds = 0.0
        self._begun: dict[str, float] = {}

    def read(self, model: Any, ids: torch.Tensor) -> None:
        """The prompt."""
        began = time.perf_counter()
        read(model, self.cache, ids)
        self.prompt_seconds = time.perf_counter() - began
        self._begun = dict(self.cache.stats().counters)

    def step(self, model: Any, token: torch.Tensor) -> None:
        self.seconds.append(step_seconds(model, self.cache, token))

    def look_at_device(self) -> None:
        """How long a modelled device reads for a token, whatever the processor does meanwhile."""
        timeline = self.cache.stats(timeline=True).timeline
        steps = timeline.steps()
        begin, end = steps[0][0].begin_ns, steps[-1][-1].end_ns
        reads = [span for span in timeline.spans if span.name == "read"]
        within = [(span.begin_ns, span.end_ns) for span in reads if begin <= span.begin_ns < end]
        self.device_ms = 1e-6 * covered(within) / len(steps)

    def since(self, name: str) -> float:
        return self.cache.stats().counters.get(name, 0.0) - self._begun.get(name, 0.0)

    def as_dict(self, steps: int, token_bytes: int) -> dict[str, Any]:
        """Figures a decoded token; `token_bytes` of K and V of all layers."""
        counters = self.cache.stats().counters
        told = {
            "name": self.name,
            "ms": round(1e3 * statistics.median(self.seconds[WARM:]), 3),
            "clustering_share": round(self.since("cluster_seconds") / sum(self.seconds), 4),
            "bytes_read": round(self.since("bytes_read") / steps),
            "requests": round(self.since("reads") / steps, 1),
            "device_ms": None if self.device_ms is None else round(self.device_ms, 3),
            "written_of_own": round(self.since("bytes_written") / steps / token_bytes, 2),
            "memory_bytes": self.cache.stats().resident_bytes - self.spans * SPAN_BYTES,
            "disk_bytes": self.cache.stats().counters["bytes_allocated_on_disk"],
        }
        tokens: float = self.group_tokens
        if "clusters" in counters:
            tokens = counters["tokens_a_cluster"] / counters["pages_a_cluster"]
            told |= {
                "prompt_seconds": round(self.prompt_seconds, 2),
                "clustering_share_of_prompt": round(
                    self._begun["cluster_seconds"] / self.prompt_seconds, 4
                ),
                "clusters": round(counters["clusters"]),
                "tokens_a_cluster": round(counters["tokens_a_cluster"], 1),
                "splits": round(self.since("cluster_splits")),
                "splits_forced": round(self.since("cluster_splits_forced")),
                "records_forced": round(self.since("cluster_records_read")),
            }
        records = self.since("records_read") / max(1.0, self.since("reads"))
        return told | {"tokens_a_read": round(records * tokens, 1)}


def covered(stretches: list[tuple[int, int]]) -> int:
    """What any of them covers."""
    total, until = 0, 0
    for begin, end in sorted(stretches):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def lines(caches: list[dict[str, Any]], ratios: dict[str, list[float]]) -> Iterator[list[str]]:
    """A row a cache."""
    for cache in caches:
        low, middle, high = ratios[cache["name"]]
        own = [str(cache.get(key, "")) for key in ("clusters", "tokens_a_cluster", "splits")]
        yield [
            cache["name"],
            f"{cache['ms']:.2f}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{cache['clustering_share']:.1%}",
            f"{format_bytes(cache['bytes_read'])}, {cache['requests']:.0f}",
            f"{cache['tokens_a_read']:.1f}",
            f"{cache['written_of_own']:.1f} x its own",
            *own,
            str(cache.get("records_forced", "")),
        ]


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    length: Annotated[int, typer.Option(help="tokens of the prompt")] = 4096,
    steps: Annotated[int, typer.Option(help="tokens that follow, one at a time")] = 1024,
    group_tokens: Annotated[int, typer.Option(help="of a group, and of a cluster's page")] = 8,
    device: Annotated[str, typer.Option(help="modelled device: nvme, ufs, emmc")] = "",
    heads: Annotated[str, typer.Option(help="who chooses: all KV heads, or each")] = "all",
    shape: Annotated[str, typer.Option(help="random weights of this shape, random text")] = "",
    kv_heads: Annotated[int, typer.Option(help="of the shape or the model; 0: its own")] = 0,
    only: Annotated[str, typer.Option(help="names of caches that begin so, by ;")] = "",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads)
    described = machine.describe(path)
    if shape:
        sized = SHAPES[shape]
        sized = dataclasses.replace(sized, kv_heads=kv_heads or sized.kv_heads)
        network = make_model(sized, length + steps)
        ids = torch.randint(4096, (length + steps,), generator=torch.Generator().manual_seed(1))
    else:
        network, sample = open_held_out(model, length + steps)
        network = with_kv_heads(network, kv_heads or network.config.num_key_value_heads)
        ids = sample.ids[: length + steps]
    steps = len(ids) - length
    spans = SPANS if device else 0
    with ExitStack() as stack:
        followers = []
        for name, config in wanted(kinds(group_tokens, heads), only):
            made = dataclasses.replace(config, device_model=device or None)
            cache = stack.enter_context(
                KVSwapCache(
                    network,
                    path,
                    made,
                    max_context=len(ids),
                    max_batch=1,
                    timeline_spans=spans,
                )
            )
            followers.append(Follower(name, cache, config.group_tokens, spans))
            followers[-1].read(network, ids[:length])
        for token in track(ids[length:], "following"):
            for follower in followers:
                follower.step(network, token)
        for follower in followers:
            if device:
                follower.look_at_device()
        stats = followers[0].cache.stats()
        own = stats.kv_bytes_full // stats.tokens
        caches = [follower.as_dict(steps, own) for follower in followers]
        first = followers[0].seconds[WARM:]
        ratios = {
            follower.name: [
                round(quartile, 3)
                for quartile in statistics.quantiles(
                    (a / b for a, b in zip(follower.seconds[WARM:], first, strict=True)), n=4
                )
            ]
            for follower in followers
        }
    table = Table(*COLUMNS, title=f"{length:,} tokens, then {steps:,}, {device or 'local disk'}")
    for line in lines(caches, ratios):
        table.add_row(*line)
    console = Console(width=150)
    console.print(table)
    if out:
        facts = {"machine": described, "model": shape or model.resolve().name, "tokens": length}
        facts |= {"steps": steps, "device": device or "local disk", "threads": threads}
        facts |= {"heads": heads, "kv_heads": network.config.num_key_value_heads}
        written = machine.write(out, facts | {"step_ratio": ratios, "caches": caches})
        console.print(f"wrote {written.name}")


if __name__ == "__main__":
    typer.run(main)
