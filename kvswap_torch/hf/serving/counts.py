"""What a server has done, as Prometheus reads it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

COUNTERS = {
    "requests": "requests to a model, by HTTP status",
    "refusals": "requests that were refused, by reason",
    "wait_seconds": "time that requests waited in line",
    "prompt_tokens": "tokens of prompts",
    "cached_tokens": "tokens of prompts that were in a cache",
    "generated_tokens": "tokens of answers",
    "hits": "requests that went on from a cache",
    "misses": "requests that began with nothing",
    "gone": "requests whose client hung up",
    "saves": "caches saved to the store",
    "save_failures": "caches that could not be saved",
    "evictions": "saved caches removed to hold the limit",
    "read_bytes": "bytes read from the disk by caches",
    "written_bytes": "bytes written to the disk by caches",
    "disk_wait_seconds": "time that layers waited for the disk",
}
GAUGES = {
    "waiting": "requests in line",
    "running": "requests being answered",
    "connections": "clients that are connected",
    "resident_bytes": "memory of the process",
    "open_files": "descriptors of the process",
    "open_files_max": "descriptors that it may have",
    "store_caches": "saved caches in the store",
    "store_unusable": "of them, those that are damaged or another model's",
    "store_left_out": "folders of the store that could not be looked at, by reason",
    "store_bytes": "disk space that the store takes",
    "store_limit_bytes": "disk space that it may take",
}


_LABELLED = ("requests", "refusals", "store_left_out")


class Counts:
    """Numbers by name, `COUNTERS` that rise and `GAUGES` that are set. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {
            (name, ""): 0 for name in (*COUNTERS, *GAUGES) if name not in _LABELLED
        }

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        with self._lock:
            self._values[name, label] = self._values.get((name, label), 0) + amount

    def set(self, name: str, value: float) -> None:
        with self._lock:
            self._values[name, ""] = value

    def set_each(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """A gauge with a label: these values, and no other one."""
        with self._lock:
            for key in [each for each in self._values if each[0] == name]:
                del self._values[key]
            for value, amount in values.items():
                self._values[name, f'{{{label}="{value}"}}'] = amount

    def __getitem__(self, name: str) -> float:
        with self._lock:
            return sum(value for (each, _), value in self._values.items() if each == name)

    def text(self) -> str:
        """Prometheus' text format 0.0.4."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for names, kind, ending in ((COUNTERS, "counter", "_total"), (GAUGES, "gauge", "")):
            for name, help_text in names.items():
                full = f"kvswap_{name}{ending}"
                lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
                lines += [
                    f"{full}{label} {value:.10g}"
                    for (each, label), value in sorted(values.items())
                    if each == name
                ]
        return "\n".join(lines) + "\n"


def status_label(status: int) -> str:
    """Of `requests`."""
    return f'{{status="{status}"}}'
