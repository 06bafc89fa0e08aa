"""Rows of `bench real_speed`: what is decoded in turn, and what is kept of each.

A row is a full cache in memory, or a method as for `python -m bench quality`. Rows of one device
are one round: they decode in turn, a token each, so that other work strikes all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import DynamicCache, StaticCache

from bench.quality.methods import product_settings
from bench.quality.product import Product
from bench.reading import read, step
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.compare.journal import Journal
from kvswap_torch.errors import BudgetError

FULL, STATIC = "full", "static"  # transformers' DynamicCache and StaticCache, without compile
IN_MEMORY = (FULL, STATIC)
LOCAL, DEVICES = "local", ("local", "nvme", "ufs", "emmc")
OWN, PREFETCH = "own", ("own", "verify", "off", "trust")
WARM = 8  # first steps that do not count
QUANTITIES = ("wait_seconds", "hidden_seconds")  # of `CacheStats`


def rounds(
    methods: Sequence[str], prefetch: Sequence[str], devices: Sequence[str]
) -> list[list[str]]:
    """Names of the rows, a list for each device; full caches are in the first, as they read none.

    Parameters
    ----------
    prefetch
        Modes; ``own``: a method's own.
    devices
        ``local`` is the disk itself, the others are modelled.

    Raises
    ------
    ValueError
        For a mode or device that there is not, or no method.
    """
    for what, given, known in (("prefetch", prefetch, PREFETCH), ("devices", devices, DEVICES)):
        unknown = [name for name in given if name not in known]
        if unknown or not given:
            raise ValueError(f"{what}: must be among {', '.join(known)}, got {', '.join(unknown)}")
    if not methods:
        raise ValueError("methods: must be at least one, such as product:memory=1/8, got none")
    found = []
    for device in dict.fromkeys(devices):
        changed = [f"storage.simulated_device={device}"] if device != LOCAL else []
        found.append(
            [
                with_settings(name, [*([f"prefetch.mode={mode}"] if mode != OWN else []), *changed])
                for name in methods
                for mode in dict.fromkeys(prefetch)
            ]
        )
    found[0] += IN_MEMORY
    return [list(dict.fromkeys(names)) for names in found]


def with_settings(name: str, settings: Sequence[str]) -> str:
    """A method's name with more settings."""
    return name if not settings else f"{name}{',' if ':' in name else ':'}{','.join(settings)}"


@dataclass
class Timed:
    """One row's steps.

    Parameters
    ----------
    seconds
        Of each step that counts.
    reads
        Of `QUANTITIES`, in those steps; empty for a cache without a disk.
    """

    seconds: list[float] = field(default_factory=list)
    reads: dict[str, float] = field(default_factory=dict)

    def facts(self, first: Timed) -> dict[str, Any]:
        """Median and quartiles in ms, the median ratio of pairs to `first`, and what was waited."""
        low, middle, high = statistics.quantiles(self.seconds, n=4)
        pairs = zip(self.seconds, first.seconds, strict=True)
        told: dict[str, Any] = {
            "ms": round(1e3 * middle, 2),
            "quartiles": [round(1e3 * low, 2), round(1e3 * high, 2)],
            "ratio": round(statistics.median(mine / other for mine, other in pairs), 3),
        }
        if self.reads:
            waited, hidden = (self.reads[name] for name in QUANTITIES)
            told |= {name: round(self.reads[name], 6) for name in QUANTITIES}
            told["wait_ms"] = round(1e3 * waited / len(self.seconds), 3)
            share = hidden / (waited + hidden) if waited + hidden else None
            told["hidden_share"] = None if share is None else round(share, 4)
        return told


def decode(model: Any, caches: dict[str, Any], ids: torch.Tensor, first: int) -> dict[str, Timed]:
    """Each token of ``ids[first:]`` in each cache in turn, after all have read what is before.

    Parameters
    ----------
    ids
        ``[tokens]`` int64; at least two more than `first` and `WARM`.
    """
    for cache in caches.values():
        read(model, cache, ids[:first])
    timed = {name: Timed() for name in caches}
    before: dict[str, dict[str, float]] = {}
    for number, token in enumerate(track(ids[first:], "decoding")):
        if number == WARM:
            before = {name: _reads(cache) for name, cache in caches.items()}
        for name, cache in caches.items():
            timed[name].seconds.append(step(model, cache, token)[0])
    for name, cache in caches.items():
        timed[name].seconds = timed[name].seconds[WARM:]
        after = _reads(cache)
        timed[name].reads = {what: after[what] - before[name][what] for what in after}
    return timed


def _reads(cache: Any) -> dict[str, float]:
    if not hasattr(cache, "stats"):
        return {}
    stats = cache.stats()
    return {what: getattr(stats, what) for what in QUANTITIES}


@dataclass(frozen=True)
class Work:
    """A model and the text that every row reads and decodes.

    Parameters
    ----------
    ids
        ``[tokens]`` int64, those that are decoded last.
    first
        Tokens that are read before.
    path
        Folder on the disk to use.
    """

    model: Any
    ids: torch.Tensor
    first: int
    size: Bytes
    path: Path

    def missing(self, names: Sequence[str], journal: Journal) -> list[str]:
        return [name for name in names if not journal.has(name)]

    def run(self, names: Sequence[str], journal: Journal) -> None:
        """Decodes in the rows of a round that the journal does not have, and adds them to it."""
        with ExitStack() as stack:
            caches: dict[str, Any] = {}
            products: dict[str, Product] = {}
            for name in self.missing(names, journal):
                try:
                    caches[name] = self._opened(name, stack, products)
                except BudgetError as error:
                    journal.add({"name": name, "impossible": str(error)})
            if not caches:
                return
            timed = decode(self.model, caches, self.ids, self.first)
            first = next(iter(caches))
            for name, cache in caches.items():
                line = {"name": name, "together": list(caches)} | timed[name].facts(timed[first])
                if first != names[0]:
                    line.pop("ratio")  # it would be to another row than the other ones are to
                if name in products:
                    line |= settings_facts(products[name], cache, self.size.full)
                journal.add(line)

    def _opened(self, name: str, stack: ExitStack, products: dict[str, Product]) -> Any:
        if name == FULL:
            return DynamicCache(config=self.model.config)
        if name == STATIC:
            return StaticCache(config=self.model.config, max_cache_len=len(self.ids))
        product = Product.named(name, product_settings(name), self.size)
        cache = stack.enter_context(product.opened(self.model, self.path, len(self.ids)))
        products[name] = product
        return cache


def settings_facts(product: Product, cache: Any, full_bytes: int) -> dict[str, Any]:
    """What a row's cache held and read, and its settings."""
    stats, config = cache.stats(), cache.driver.config
    return product.facts(cache) | {
        "memory_share": round(stats.resident_bytes_peak / full_bytes, 4),
        "prefetch_hits": stats.prefetch_hits,
        "prefetch_wasted": stats.prefetch_wasted,
        "resident_layers": config.memory.resident_layers,
        "device": config.storage.simulated_device or "local disk",
    }


def told(names: Sequence[Sequence[str]], journal: Journal) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows that the journal has, in order."""
    lines = {line["name"]: line for line in journal.lines()}
    for name in (name for names_of_round in names for name in names_of_round):
        if name in lines:
            yield name, {key: value for key, value in lines[name].items() if key != "name"}
