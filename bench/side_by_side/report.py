"""Side-by-side results: cells as they were measured, and a table of one in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import RESULTS
from bench.side_by_side.busy import why_busy
from bench.side_by_side.plan import CHOICES, in_order, label
from kvswap_torch import format_bytes

FOLDER = RESULTS / "side_by_side"
OF_LLAMA = RESULTS / "side_by_side_llama"
OF_LATENT = RESULTS / "side_by_side_latent"
ABOUT = ("llama_cpp_python", "weights", "kv_type", "system", "ollm", "page_cache")  # of a peer
COLUMNS = (
    "contender", "ms per step (quartiles)", "against kvswap", "KV memory", "seen from outside",
    "read per step", "written per step, per token stored", "CPU s per step", "hits",
    "times its bound", "most above it",
)  # fmt: skip


def load(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All cells, shapes in the order of their size, then contexts and batches."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(
        (result for result in found if "contenders" in result),
        key=_order,
    )


def _order(result: dict[str, Any]) -> tuple[Any, ...]:
    choices = list(CHOICES).index(result.get("choices", "random"))
    return (
        _shape_order(result["shape"]),
        result["device"],
        result["context"],
        result["batch"],
        choices,
    )


def _shape_order(name: str) -> int:
    order = ("tiny", "small", "1b", "1b-whole", "8b-layers")
    return order.index(name) if name in order else len(order)


def title(result: dict[str, Any]) -> str:
    """The cell, marked where something else had the machine, and where choices are a model's."""
    busy = why_busy(result)
    choices = result.get("choices", "random")
    return (
        f"{result['shape']} ({result['layers']} layers), {result['context']:,}, {result['batch']}"
        + (f", {CHOICES[choices]}" if choices != "random" else "")
        + (f" (busy machine: {busy})" if busy else "")
    )


def keys_of(result: dict[str, Any]) -> list[str]:
    """Of the cell's contenders, those without a result included."""
    return in_order([*result["contenders"], *result["empty"]])


def cells_of(row: dict[str, Any], full_bytes: int) -> list[str]:
    """A contender's row, in the order of COLUMNS."""
    ratio, share = row["against_kvswap"], row["kv_memory_bytes"] / full_bytes
    part, over = row["roofline"]["largest_part_over"]
    hits, (low, high) = row.get("hit_rate"), row["ms_quartiles"]
    return [
        f"{row['ms']:.1f} ({low:.1f} - {high:.1f})",
        "" if ratio is None else f"{ratio:.2f}x",
        f"{format_bytes(row['kv_memory_bytes'])} ({share:.1%})",
        format_bytes(max(0, row["memory_outside_bytes"])),
        format_bytes(row["bytes_read"]),
        f"{format_bytes(row['bytes_written'])}, "
        f"{format_bytes(row['bytes_written_per_token_stored'])}",
        f"{row['cpu_seconds']:.3f}",
        "" if hits is None else f"{hits:.1%}",
        f"{row['roofline']['distance']:.2f} x {row['roofline']['ms']:.1f} ms",
        f"{part} +{over:.1f} ms",
    ]


def print_cell(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"{title(result)}, {result['device']}", padding=(0, 0))
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for key in keys_of(result):
        row = result["contenders"].get(key)
        if row is None:
            table.add_row(label(key), result["empty"][key])
        else:
            table.add_row(label(key), *cells_of(row, result["kv_bytes_full"]))
    console.print(table)
    for key, row in result["contenders"].items():
        told = ", ".join(f"{name} {row[name].strip()}" for name in ABOUT if name in row)
        if told:
            console.print(f"{label(key)}: {told}", highlight=False)
