"""Whether a cell was measured while something else had the machine: its times then say little."""

from __future__ import annotations

from typing import Any

IN_MEMORY = ("floor", "static", "dynamic", "llama_f16", "llama_q8", "llama_floor")
SHARE_MIN = 0.65  # of the cores; the busiest of these has more where nothing else computes
FLOOR_TIMES_MAX = 2.0


def why_busy(result: dict[str, Any]) -> str:
    """In a few words; empty where nothing speaks for it.

    A step of who reads no disk waits for nothing but the processor: where even the busiest of them
    takes hardly more processor time than time, with several threads, these had no core each. The
    floor is the same work in every run of a cell.
    """
    rows, cores = result["contenders"], result.get("machine", {}).get("cores", 1)
    had = [1e3 * rows[key]["cpu_seconds"] / rows[key]["ms"] for key in IN_MEMORY if key in rows]
    if cores > 1 and had and max(had) < SHARE_MIN * cores:
        return f"had {max(had):.1f} of {cores} cores"
    least = result.get("floor_ms_least")
    if least and "floor" in rows and rows["floor"]["ms"] > FLOOR_TIMES_MAX * least:
        return f"floor {rows['floor']['ms'] / least:.1f} times an earlier run's"
    return ""


def floor_ms_least(result: dict[str, Any], before: dict[str, Any] | None) -> float | None:
    """Of this run of a cell and those before it, by what the newest of them knew."""
    known = [] if before is None else [before.get("floor_ms_least")]
    known += [run["contenders"].get("floor", {}).get("ms") for run in (before, result) if run]
    return min((ms for ms in known if ms is not None), default=None)
