"""The table of layers on disk: accelerate's hooks alone, our cache, and reading ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.pages.caption import caption, head, line
from kvswap_torch import format_bytes

FILES = {"cached": "in the page cache", "dropped": "dropped before each token"}


def offload_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """A line a contender, for each model and state of the page cache."""
    what = (
        "A token with all decoder layers on disk by accelerate's `device_map`, batch 1: all that is"
        " attended is the same, and so are the tokens. kvswap: the preset `exact`. Reading ahead"
        " goes past the page cache. Over accelerate's: of pairs in one run."
    )
    yield caption(what, results, "Lower is better")
    columns = ("model, layers on disk, tokens", "its files", "weights, cache", "ms per token")
    yield from head([*columns, "over accelerate's", "read from disk per token"])
    for result in results:
        size = format_bytes(result["layer_bytes"])
        model = f"{result['model']}, {result['layers']} of {size}, {result['tokens']:,}"
        for pages, rows in result["pages"].items():
            files = FILES[pages]
            for name, row in rows.items():
                low, high = row["ms_quartiles"]
                ms = f"{row['ms']:.1f} ({low:.1f} - {high:.1f})"
                yield line([model, files, name, ms, _over(row), format_bytes(row["bytes_read"])])
                model = files = ""


def _over(row: dict[str, Any]) -> str:
    """Its time as a share, and who is ahead."""
    ratio = row["ratio_of_pairs"]
    if ratio == 1:
        return ""
    return f"{ratio:.2f}, {'slower' if ratio > 1 else 'faster'}"
