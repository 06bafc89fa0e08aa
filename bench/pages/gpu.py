"""The tables of docs/gpu.md, and README's line about GPUs, from tests/gpu/results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.pages.caption import head, line

Result = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "tests" / "gpu" / "results"
README_BEGIN = "- [On a GPU](docs/gpu.md): "
OURS = {
    "kvswap": "100 groups",
    "kvswap-k400": "400 groups",
    "kvswap-fp8": "100 groups, e4m3",
    "kvswap-int4": "100 groups, int4",
    "kvswap-text": "100 groups, a text's",
    "kvswap-text-k400": "400 groups, a text's",
}
CEILINGS = {
    "device_copy_gb_per_s": "copy on the device, read and written, GB/s",
    "host_to_device_gb_per_s": "copy to the device, GB/s",
    "device_to_host_gb_per_s": "copy from the device, GB/s",
    "torch_launch_us": "one launch through torch, µs of the host",
}
PEERS = ("inplace", "dynamic", "offloaded")


def step_rows(result: Result) -> Iterator[str]:
    yield from head(["step", "outcome", "took"])
    for row in result["steps"]:
        yield line([row["step"], row["outcome"], f"{row['seconds']:.0f} s"])


def op_rows(result: Result) -> Iterator[str]:
    yield from head(["op", "MiB", "µs", "GB/s", "to a copy", "its kernels alone", "expected"])
    for row in result["ops"]["rows"]:
        yield line(
            [
                row["op"],
                f"{row['input_mib']}",
                f"{row['microseconds']:.0f}",
                f"{row['gb_per_s']:.0f}",
                f"{row['ratio']:.2f}",
                f"{row['kernel_ratio']:.2f}" if row["kernel_ratio"] else "",
                row["predicted"],
            ]
        )


def decode_rows(result: Result) -> Iterator[str]:
    found: dict[tuple[str, str, int, int], Result] = {}
    for place, part in result["decode"].items():
        for row in part.get("rows", []):
            found[place, row["cache"], row["context"], row["batch"]] = row
    measured = [peer for peer in PEERS if any(peer == name for _, name, _, _ in found)]
    columns = ["tokens", "batch", "ours", "disk", "ours, ms", *(f"{peer}, ms" for peer in measured)]
    columns += ["read, MiB a step", "waited for it, ms", "device memory, MiB"]
    yield from head(columns)
    for (place, name, context, batch), row in sorted(found.items(), key=lambda item: item[0][2:]):
        if name not in OURS:
            continue
        peers = [
            next((found[p, peer, context, batch] for p in result["decode"]
                  if (p, peer, context, batch) in found), None)
            for peer in measured
        ]  # fmt: skip
        clock = row["stats"]["ms_per_step"]
        yield line([
            f"{context:,}", str(batch), OURS[name], place,
            *("" if each is None else f"{each['ms_median']:.1f}" for each in (row, *peers)),
            f"{row['stats']['read_bytes_per_step'] / 2**20:.1f}", f"{clock['wait']:.1f}",
            f"{row['stats']['device_bytes'] / 2**20:.0f} of {row['kv_bytes_full'] / 2**20:.0f}",
        ])  # fmt: skip


def fact_rows(result: Result) -> Iterator[str]:
    yield from head(["what", "value"])
    yield line(["card", result["device"]])
    yield line(["torch", f"{result['torch']}, CUDA {result['cuda']}"])
    yield line(["date", result["date"]])
    yield line(["command", f"`{result['command']}`"])
    for name, value in result["ops"].get("ceilings", {}).items():
        yield line([CEILINGS[name], f"{value:g}"])


def from_in_place(result: Result, place: str) -> list[float]:
    """A step of each of ours there by a step of the cache in place, which is measured once."""
    rows = [row for part in result["decode"].values() for row in part.get("rows", [])]
    peers = {(row["shape"], row["context"], row["batch"]): row["ms_median"]
             for row in rows if row["cache"] == "inplace"}  # fmt: skip
    found = []
    for row in result["decode"][place].get("rows", []):
        peer = peers.get((row["shape"], row["context"], row["batch"]))
        if row["cache"] in OURS and peer:
            found.append(row["ms_median"] / peer)
    return sorted(found)


def in_short(result: Result) -> str:
    """README's line: what ran, and how far a step is from a cache in the device's memory."""
    failed = [row["step"] for row in result["steps"] if row["outcome"] != "ok"]
    passed = f"all but {', '.join(failed)} of the" if failed else f"all {len(result['steps'])}"
    places = []
    for place in result["decode"]:
        if found := from_in_place(result, place):
            places.append(f"{found[0]:.1f} to {found[-1]:.1f} times with records on {place}")
    slower = "; ".join(places).replace("on memory", "in memory")
    return (
        f"{README_BEGIN}{passed} steps of `make gpu-check` that ran passed on {result['device']} "
        f"({result['date']}); a decoding step takes longer than with a cache in its memory, in "
        f"place and attended by flash: {slower}"
    )


def readme(text: str, result: Result) -> str:
    """README with its line made anew."""
    lines = text.splitlines(keepends=True)
    at = [i for i, each in enumerate(lines) if each.startswith(README_BEGIN)]
    if len(at) != 1:
        raise SystemExit(f"table: README.md must have one line of {README_BEGIN!r}")
    lines[at[0]] = in_short(result) + "\n"
    return "".join(lines)


def latest() -> Result:
    results = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    return max(results, key=lambda result: result["date"])
