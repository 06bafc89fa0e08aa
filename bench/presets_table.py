"""The table of presets at equal bytes, made by `python -m bench.quality --methods presets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.quality.plan import SHARES, preset_method
from kvswap_torch import format_bytes
from kvswap_torch.preset import presets

# Points lost against the full cache in papers' own comparisons, at these shares of the KV memory
# or numbers of tokens: KVSwap's table 2 (RULER 91.6, Llama 3 8B, 32K tokens) and PRKV's table 2
# (LongBench v2 30.8, Llama 8B, 1,024 tokens).
PAPERS = {
    "kvswap": "2.6 of 91.6 at 1/13, 5.6 at 1/34",
    "infinigen": "87.0 of 91.6 at 1/13",
    "infinigen-star": "78.7 of 91.6 at 1/13",
    "loki": "34.0 of 91.6 at 1/13, 85.4 at 1/34",
    "quest": "12.7 of 30.8 with 1,024 tokens",
    "arkvale": "1.2 of 30.8 with 1,024 tokens",
    "snapkv": "1.2 of 30.8 with 1,024 tokens",
    "prkv": "0.0 of 30.8 with 1,024 tokens",
}


NOT_RUN = "not run"
SAME = ("model", "digest", "dtype", "wording", "text", "seed")  # of runs that fill one table


def joined(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the same model over the same documents as one; a later run's figures count."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        for length, part in result["lengths"].items():
            key = (*(result.get(name) for name in SAME), length, part["documents"])
            known = found.setdefault(key, {**result, "lengths": {length: {**part}}})
            into = known["lengths"][length]
            into["methods"] = into["methods"] | part["methods"]
            into["impossible"] = into["impossible"] | part["impossible"]
    return list(found.values())


def preset_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each model and length, the full cache first; what does not fit says so."""
    for result in joined(results):
        for length, part in result["lengths"].items():
            answers = part["methods"]["full"]["tasks"]["all"]["answers"]
            yield (
                f"**{result['model']}**, {int(length):,} tokens, documents: {part['documents']}, "
                f"answers: {answers}"
            )
            yield from ("", *_table(part), "")


def _table(part: dict[str, Any]) -> Iterator[str]:
    """A line for each preset, a column for each share of the memory that any was run in."""
    shares = [share for share in SHARES if _has(part, share)]
    columns = [f"{share} of the memory" for share in shares]
    yield _line(["preset", *columns, "the papers lose"])
    yield "|" + "---|" * (len(shares) + 2)
    full = part["methods"]["full"]["tasks"]["all"]["exact"]
    yield _line(["full cache, all of the memory", *[f"{full[0]:.2f}"] * len(shares), ""])
    for preset in presets():
        cells = [_cell(part, preset_method(preset.name, share)) for share in shares]
        if preset.needs and set(cells) == {NOT_RUN}:
            cells = ["needs a file of the model"] * len(shares)
        yield _line([f"`{preset.name}`", *cells, PAPERS.get(preset.name, "")])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _has(part: dict[str, Any], share: str) -> bool:
    names = [preset_method(preset.name, share) for preset in presets()]
    return any(name in part["methods"] or name in part["impossible"] for name in names)


def _cell(part: dict[str, Any], name: str) -> str:
    if name in part["impossible"]:
        return "does not fit"
    if name not in part["methods"]:
        return NOT_RUN
    method = part["methods"][name]
    right = method["tasks"].get("all", {}).get("exact")
    told = "0.00" if right is None else f"{right[0]:.2f}"
    return f"{told}, reads {format_bytes(method['bytes_read_per_token'])}"
