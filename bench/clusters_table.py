"""Tables of clusters of similar keys (DynaKV) beside KVSwap: what they hold, and what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.quality.report import right_answers
from kvswap_torch import format_bytes

Result = dict[str, Any]
DEVICES = ("local", "ufs", "emmc")


def cluster_rows(results: list[Result]) -> Iterator[str]:
    """A line for each method that reads, in falling recall."""
    yield (
        "| model, tokens, documents | method | KV memory | tokens chosen | clusters | recall "
        "| right | read per token | requests | ms: local, ufs, emmc |"
    )
    yield "|---|---|" + "---|" * 8
    for result in results:
        for length, part in result["lengths"].items():
            full = part["methods"]["full"]
            title = f"{result['model']}, {int(length):,}, {full['documents']}"
            right = right_answers(full)
            yield f"| {title} | full | 1/1.0 | all | | 1.000 | {right} | | | |"
            reading = {name: m for name, m in part["methods"].items() if m.get("disk")}
            for name in sorted(reading, key=lambda name: -_recall(reading[name])):
                yield f"| | `{name}` | {_cells(reading[name])} |"
            for name in part["impossible"]:
                yield f"| | `{name}` | does not fit |" + " |" * 7


def _cells(method: Result) -> str:
    disk, share = method["disk"], method["memory_share"]
    clusters = method["clusters"]
    return " | ".join(
        [
            "" if share is None else f"1/{1 / share:.1f}",
            f"{method['tokens_per_step']:.0f}",
            "" if clusters is None else f"{clusters:.0f}",
            f"{_recall(method):.3f}",
            right_answers(method),
            format_bytes(disk["bytes"]),
            f"{disk['requests']:.0f}",
            ", ".join(f"{disk['ms'][name]:.1f}" for name in DEVICES if name in disk["ms"]),
        ]
    )


def _recall(method: Result) -> float:
    layers = method["layers"]["recall"]
    return sum(layer[0] for layer in layers) / len(layers)


def drift_rows(results: list[Result]) -> Iterator[str]:
    """A line for each update: variance within clusters and recall at the end."""
    yield (
        "| heads, score | update | variance | recall at the end | attended there | clusters "
        "| tokens of one, of the largest | splits | forced reads |"
    )
    yield "|---|---|" + "---|" * 7
    for result in results:
        asked = result["asked"]
        title = f"{asked['heads']}, {asked['score']}"
        for update, mean in result["mean"].items():
            yield (
                f"| {title} | {update} | {mean['variance']:.1f} | {mean['recall_at_end']:.3f} "
                f"| {mean['attended_at_end']:.0f} | {mean['clusters']:.0f} "
                f"| {mean['tokens_of_cluster']:.1f}, {mean['largest']:.0f} | {mean['splits']:.0f} "
                f"| {mean['forced']:.0f} |"
            )
            title = ""


def clustering_rows(results: list[Result]) -> Iterator[str]:
    """What caches cost while a text goes on, groups first; ratios are of pairs of steps."""
    yield (
        "| model, KV heads, who chooses, tokens + steps | disk | cache | ms a token, of groups' "
        "| device's ms | read, requests a token | tokens a read | written, of its own bytes "
        "| clusters, tokens of one | read for who waits |"
    )
    yield "|---" * 10 + "|"
    for result in sorted(results, key=_cell):
        model, kv_heads, heads, tokens, device = _cell(result)
        place = f"{model}, {kv_heads}, {heads}, {tokens:,} + {result['steps']:,} | {device}"
        for cache in result["caches"]:
            low, middle, high = result["step_ratio"][cache["name"]]
            is_first = cache is result["caches"][0]
            time = f"{cache['ms']:.2f}" if is_first else f"{middle:.2f} ({low:.2f} to {high:.2f})"
            sizes = [str(cache.get(key, "")) for key in ("clusters", "tokens_a_cluster")]
            cells = [
                cache["name"],
                time,
                "" if cache.get("device_ms") is None else f"{cache['device_ms']:.2f}",
                f"{format_bytes(cache['bytes_read'])}, {cache['requests']:.0f}",
                f"{cache['tokens_a_read']:.1f}",
                f"{cache['written_of_own']:.1f}",
                ", ".join(size for size in sizes if size),
                str(cache.get("records_forced", "")),
            ]
            yield f"| {place} | " + " | ".join(cells) + " |"
            place = " | "


def _cell(result: Result) -> tuple[str, int, str, int, str]:
    return tuple(result[key] for key in ("model", "kv_heads", "heads", "tokens", "device"))
