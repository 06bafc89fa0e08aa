"""Side-by-side results as tables: in the terminal, in the docs, in full beside the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import RESULTS
from bench.side_by_side.busy import why_busy
from bench.side_by_side.plan import DEFAULT, FLOORS, LABELS, LLAMA, in_order, label
from kvswap_torch import format_bytes

FOLDER = RESULTS / "side_by_side"
OF_PRESETS = RESULTS / "side_by_side_presets"
OF_LLAMA = RESULTS / "side_by_side_llama"
IN_FULL = "1b_32k_b8_local"  # the cell that the results page shows with everything
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
        key=lambda r: (_shape_order(r["shape"]), r["device"], r["context"], r["batch"]),
    )


def _shape_order(name: str) -> int:
    order = ("tiny", "small", "1b", "1b-whole", "8b-layers")
    return order.index(name) if name in order else len(order)


def title(result: dict[str, Any]) -> str:
    """The cell, marked where something else had the machine."""
    busy = why_busy(result)
    return (
        f"{result['shape']} ({result['layers']} layers), {result['context']:,}, {result['batch']}"
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


def compact_rows(folder: Path = FOLDER) -> Iterator[str]:
    """A line a cell: kvswap's time and memory, and the others' time against it."""
    results = load(folder)
    asked = {key for result in results for key in keys_of(result)}
    peers = [key for key in DEFAULT if key != "kvswap" and key in asked]
    heads = ["shape, context, batch", "disk", "KV memory", "kvswap"]
    yield "| " + " | ".join(heads + [LABELS[key] for key in peers]) + " |"
    yield "|" + "---|" * (len(heads) + len(peers))
    for result in results:
        ours = result["contenders"].get("kvswap")
        if ours is None:
            continue
        share = ours["kv_memory_bytes"] / result["kv_bytes_full"]
        line = [title(result), result["device"], f"1/{1 / share:.1f}", f"{ours['ms']:.1f} ms"]
        for key in peers:
            row = result["contenders"].get(key)
            line.append(f"{row['against_kvswap']:.2f}x" if row else _why(result, key))
        yield "| " + " | ".join(line) + " |"


def full_rows(result: dict[str, Any]) -> Iterator[str]:
    """Everything about one cell."""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for key in keys_of(result):
        row = result["contenders"].get(key)
        if row is None:
            line = [result["empty"][key]] + [""] * (len(COLUMNS) - 2)
        else:
            line = cells_of(row, result["kv_bytes_full"])
        yield "| " + " | ".join([label(key), *line]) + " |"


def context_rows(folder: Path = OF_LLAMA) -> Iterator[str]:
    """Where llama.cpp was measured: what the context costs each engine above so few tokens."""
    columns = ("shape, context, batch", "contender", "KV memory", "ms per step", "few tokens",
               "the context costs", "against kvswap's")  # fmt: skip
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for result in load(folder):
        rows, place = result["contenders"], title(result)
        if "llama_floor" not in rows or "floor" not in rows:
            continue
        ours = rows["kvswap"]["ms"] - rows["floor"]["ms"]
        for key in keys_of(result):
            row = rows.get(key)
            if row is None or key in FLOORS:
                continue
            few = rows["llama_floor" if key in LLAMA else "floor"]["ms"]
            cost, memory = row["ms"] - few, format_bytes(row["kv_memory_bytes"])
            against = "" if key == "kvswap" or ours <= 0 else f"{cost / ours:.1f}x"
            line = [place, label(key), memory, f"{row['ms']:.1f}", f"{few:.1f}", f"{cost:.1f}"]
            yield "| " + " | ".join([*line, against]) + " |"
            place = ""


def in_full(folder: Path = FOLDER) -> Iterator[str]:
    """That cell with everything; nothing when it has not been measured."""
    path = folder / f"{IN_FULL}.json"
    if path.exists():
        yield from full_rows(json.loads(path.read_text()))


def preset_rows(folder: Path = OF_PRESETS) -> Iterator[str]:
    """A line a contender, presets by their own settings among them."""
    columns = ("shape, context, batch", "contender", *COLUMNS[1:4], "read per step", "hits")
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for result in load(folder):
        place = f"{title(result)}, {result['device']}"
        for key in keys_of(result):
            row = result["contenders"].get(key)
            cells = cells_of(row, result["kv_bytes_full"]) if row else []
            told = [*cells[:3], cells[4], cells[7]] if cells else [result["empty"][key], *[""] * 4]
            yield "| " + " | ".join([place, label(key), *told]) + " |"
            place = ""


def write_all(folder: Path = FOLDER) -> Path | None:
    """Every cell with everything, as tables.md beside the results."""
    results = load(folder)
    if not results:
        return None
    lines = ["# Side by side, every cell", "", "Written by `python -m bench.table`."]
    for result in results:
        lines += ["", f"## {title(result)}, {result['device']}", "", *full_rows(result)]
    path = folder / "tables.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _why(result: dict[str, Any], key: str) -> str:
    """Why a contender has no time, in a word: what its reason begins with."""
    word = result["empty"].get(key, "").split(":")[0]
    return "does not fit" if word == "BudgetError" else word
