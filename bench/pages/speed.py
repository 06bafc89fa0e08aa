"""Table 1: milliseconds of a decoding step beside what people would use instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.headline import NO_PREFETCH, is_cell_without_prefetch
from bench.pages.caption import NOT_MEASURED, caption, head, line
from bench.pages.caption import share as part_of
from bench.side_by_side.plan import label
from bench.side_by_side.report import keys_of, load, title
from kvswap_torch import format_bytes

Result = dict[str, Any]
SHOWN = ("static", "dynamic", "restore", "mmap", "tokens", "floor")
WHAT = (
    "Milliseconds per step (one token of every sequence), medians; random weights. So no group is"
    " attended twice, the worst case, but where choices are those that a model made. Published"
    " settings: score by sum, rank 32, prefetch in every layer, 400 tokens. Defaults: a cache that"
    " was given the memory alone. No prefetch: measured before `verify` became its mode, so that"
    " no read is overlapped. Limit: what the bytes that such a step of the defaults reads, weights"
    " too, take at once at the speed of memory and disk that was measured in that run; below 1 the"
    " disk was faster than that."
)
LOWER = "Lower is better"
LATENT_LABELS = {"preset:exact": "kvswap, all tokens"}


def speed_rows(results: list[Result] | None = None) -> Iterator[str]:
    """A line a cell; every column is one configuration."""
    results = load() if results is None else results
    yield caption(WHAT, results, LOWER)
    columns = ["model, tokens, batch", "disk", "KV memory", "published", "defaults"]
    columns += [label(key) for key in SHOWN]
    yield from head([*columns, "defaults' time over StaticCache's", "defaults' limit"])
    for result in results:
        rows = result["contenders"]
        memory = part_of(rows["kvswap"]["kv_memory_bytes"] / result["kv_bytes_full"])
        cells = [title(result), result["device"], memory]
        cells += [_ms(result, key) for key in ("kvswap", "default", *SHOWN)]
        yield line([*cells, over(rows, "default", "static"), limit(rows)])


def limit(rows: Result) -> str:
    """Of the defaults' step, and how often they take it."""
    found = rows.get("default", {}).get("roofline")
    return f"{found['ms']:.1f}, {found['distance']:.2f} times it" if found else NOT_MEASURED


def over(rows: Result, one: str, other: str) -> str:
    """One contender's time as a share of another's, and in a word which is faster."""
    if one not in rows or other not in rows:
        return NOT_MEASURED
    ratio = rows[one]["ms"] / rows[other]["ms"]
    return f"{ratio:.2f}, {'slower' if ratio > 1 else 'faster'}"


def _ms(result: Result, key: str) -> str:
    row = result["contenders"].get(key)
    if not row:
        return NOT_MEASURED
    is_old = key == "default" and is_cell_without_prefetch(row)
    return f"{row['ms']:.1f}, {NO_PREFETCH}" if is_old else f"{row['ms']:.1f}"


def peer_rows(results: list[Result]) -> Iterator[str]:
    """Other engines, a line each: of a step that much is the context's."""
    what = (
        "Milliseconds per step with the published settings beside llama.cpp and oLLM, the same"
        " weights and the same random keys and values. Few tokens: the same engine over 400 tokens."
    )
    yield caption(what, results, LOWER)
    columns = ("model, tokens, batch", "cache", "KV memory", "ms per step", "over few tokens")
    yield from head(columns)
    for result in results:
        rows, place = result["contenders"], title(result)
        for key in keys_of(result):
            if key in rows and key not in ("floor", "llama_floor"):
                few = rows["llama_floor" if key.startswith("llama") else "floor"]["ms"]
                memory = format_bytes(rows[key]["kv_memory_bytes"])
                yield line([place, label(key), memory, f"{rows[key]['ms']:.1f}", f"{few:.1f}"])
                place = ""


def latent_rows(results: list[Result]) -> Iterator[str]:
    """Latent attention, a line a cache: its memory, and what a step takes and reads."""
    what = (
        "A step of latent attention (MLA): widths and heads of DeepSeek-V2-Lite, bf16, random"
        " weights and latents. Left out are 23 of its 27 layers, its vocabulary and its experts:"
        " each layer has the first one's dense MLP. Defaults: 1/13 of the full cache's memory. All"
        " tokens: the preset `exact`, which reads and attends the whole cache. Memory of the"
        " process: what it has more than before the cache was made."
    )
    yield caption(what, results, LOWER)
    columns = ("model, tokens, batch", "cache", "KV memory", "memory of the process")
    yield from head([*columns, "ms per step", "read from disk per step"])
    for result in results:
        place = title(result)
        for key in keys_of(result):
            row = result["contenders"].get(key)
            cells = [place, LATENT_LABELS.get(key, label(key))]
            if row is None:
                yield line([*cells, *[NOT_MEASURED] * 4])
            else:
                memory = (row["kv_memory_bytes"], row["memory_outside_bytes"], row["bytes_read"])
                kept, seen, read = (format_bytes(max(0, number)) for number in memory)
                yield line([*cells, kept, seen, f"{row['ms']:.1f}", read])
            place = ""
