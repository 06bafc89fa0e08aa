"""Table 1: milliseconds of a decoding step beside what people would use instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    " was given the memory alone."
)
LOWER = "Lower is better"


def speed_rows(results: list[Result] | None = None) -> Iterator[str]:
    """A line a cell; every column is one configuration."""
    results = load() if results is None else results
    yield caption(WHAT, results, LOWER)
    columns = ["model, tokens, batch", "disk", "KV memory", "published", "defaults"]
    columns += [label(key) for key in SHOWN]
    yield from head([*columns, "defaults' time over StaticCache's"])
    for result in results:
        rows = result["contenders"]
        memory = part_of(rows["kvswap"]["kv_memory_bytes"] / result["kv_bytes_full"])
        cells = [title(result), result["device"], memory]
        cells += [_ms(result, key) for key in ("kvswap", "default", *SHOWN)]
        yield line([*cells, over(rows, "default", "static")])


def over(rows: Result, one: str, other: str) -> str:
    """One contender's time as a share of another's, and in a word which is faster."""
    if one not in rows or other not in rows:
        return NOT_MEASURED
    ratio = rows[one]["ms"] / rows[other]["ms"]
    return f"{ratio:.2f}, {'slower' if ratio > 1 else 'faster'}"


def _ms(result: Result, key: str) -> str:
    row = result["contenders"].get(key)
    return f"{row['ms']:.1f}" if row else NOT_MEASURED


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
