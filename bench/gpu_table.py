"""Writes the tables of docs/gpu.md from tests/gpu/results: ``python -m bench.gpu_table``.

Each stands between `<!-- gpu:NAME -->` and `<!-- /gpu:NAME -->`; what is between them is replaced.
README's line about GPUs is replaced too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "gpu" / "results"
PAGE = ROOT / "docs" / "gpu.md"
README = ROOT / "README.md"
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


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def steps(result: dict[str, Any]) -> str:
    rows = [[row["step"], row["outcome"], f"{row['seconds']:.0f} s"] for row in result["steps"]]
    return table(["step", "outcome", "took"], rows)


def ops(result: dict[str, Any]) -> str:
    rows = [
        [
            row["op"],
            f"{row['input_mib']}",
            f"{row['microseconds']:.0f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['kernel_ratio']:.2f}" if row["kernel_ratio"] else "",
            row["predicted"],
        ]
        for row in result["ops"]["rows"]
    ]
    head = ["op", "MiB", "µs", "GB/s", "to a copy", "its kernels alone", "expected"]
    return table(head, rows)


def milliseconds(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['ms_median']:.1f}"


def decode(result: dict[str, Any]) -> str:
    found: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    for place, part in result["decode"].items():
        for row in part.get("rows", []):
            found[place, row["cache"], row["context"], row["batch"]] = row
    measured = [peer for peer in PEERS if any(peer == name for _, name, _, _ in found)]
    rows = []
    for (place, name, context, batch), row in sorted(found.items(), key=lambda item: item[0][2:]):
        if name not in OURS:
            continue
        peers = [
            next((found[p, peer, context, batch] for p in result["decode"]
                  if (p, peer, context, batch) in found), None)
            for peer in measured
        ]  # fmt: skip
        clock = row["stats"]["ms_per_step"]
        rows.append([
            f"{context:,}", str(batch), OURS[name], place,
            milliseconds(row), *map(milliseconds, peers),
            f"{row['stats']['read_bytes_per_step'] / 2**20:.1f}", f"{clock['wait']:.1f}",
            f"{row['stats']['device_bytes'] / 2**20:.0f} of {row['kv_bytes_full'] / 2**20:.0f}",
        ])  # fmt: skip
    head = ["tokens", "batch", "ours", "disk", "ours, ms", *(f"{peer}, ms" for peer in measured),
            "read, MiB a step", "waited for it, ms", "device memory, MiB"]  # fmt: skip
    return table(head, rows)


def facts(result: dict[str, Any]) -> str:
    ceilings = result["ops"].get("ceilings", {})
    rows = [
        ["card", result["device"]],
        ["torch", f"{result['torch']}, CUDA {result['cuda']}"],
        ["date", result["date"]],
        ["command", f"`{result['command']}`"],
        *([CEILINGS[name], f"{value:g}"] for name, value in ceilings.items()),
    ]
    return table(["what", "value"], rows)


def from_in_place(result: dict[str, Any], place: str) -> list[float]:
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


def in_short(result: dict[str, Any]) -> str:
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


def written(text: str, result: dict[str, Any]) -> str:
    """The page with its tables made anew."""
    for name, make in (("facts", facts), ("steps", steps), ("ops", ops), ("decode", decode)):
        marked = re.compile(f"(<!-- gpu:{name} -->\n).*?(<!-- /gpu:{name} -->)", re.DOTALL)
        made = make(result)
        text, count = marked.subn(lambda m, made=made: f"{m[1]}{made}\n{m[2]}", text)
        if count != 1:
            raise SystemExit(f"gpu_table: {PAGE.name} must have one pair of markers gpu:{name}")
    return text


def readme(text: str, result: dict[str, Any]) -> str:
    """README with its line made anew."""
    lines = text.splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.startswith(README_BEGIN)]
    if len(at) != 1:
        raise SystemExit(f"gpu_table: {README.name} must have one line of {README_BEGIN!r}")
    lines[at[0]] = in_short(result) + "\n"
    return "".join(lines)


def latest() -> dict[str, Any]:
    results = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    return max(results, key=lambda result: result["date"])


def main() -> None:
    for path, make in ((PAGE, written), (README, readme)):
        path.write_text(make(path.read_text(encoding="utf-8"), latest()), encoding="utf-8")


if __name__ == "__main__":
    main()
