"""What a server has done, as Prometheus reads it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

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
    "verified": "saved caches that were read whole while nothing was asked, by what was found",
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
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
HISTOGRAMS = {
    "first_token_seconds": "time from a request to its answer's first token, waiting included",
    "token_seconds": "time between two tokens of an answer",
    "request_seconds": "time from a request to the end of its answer",
}
LABELS = {
    "requests": "status",
    "refusals": "reason",
    "store_left_out": "reason",
    "verified": "found",
}


class Counts:
    """Numbers by name: `COUNTERS` that rise, `GAUGES` that are set, `HISTOGRAMS` of times.

    Any thread.

    Raises
    ------
    ImportError
        prometheus_client is missing.
    """

    def __init__(self) -> None:
        import prometheus_client as prometheus

        prometheus.disable_created_metrics()  # when each number began: as many lines again
        self._registry = prometheus.CollectorRegistry()
        self._lock = threading.Lock()  # a gauge with labels changes as a whole
        self._metrics: dict[str, Any] = {}
        kinds = ((COUNTERS, prometheus.Counter), (GAUGES, prometheus.Gauge))
        for names, kind in kinds:
            for name, text in names.items():
                labels = [LABELS[name]] if name in LABELS else []
                self._metrics[name] = kind(f"kvswap_{name}", text, labels, registry=self._registry)
        for name, text in HISTOGRAMS.items():
            self._metrics[name] = prometheus.Histogram(
                f"kvswap_{name}", text, registry=self._registry, buckets=_SECONDS
            )

    def add(self, name: str, amount: float = 1, **label: str) -> None:
        metric = self._metrics[name]
        (metric.labels(**label) if label else metric).inc(amount)

    def set(self, name: str, value: float) -> None:
        self._metrics[name].set(value)

    def observe(self, name: str, seconds: float) -> None:
        """A time for a histogram."""
        self._metrics[name].observe(seconds)

    def set_each(self, name: str, values: Mapping[str, float]) -> None:
        """A gauge with a label: these values, and no other one."""
        with self._lock:
            metric = self._metrics[name]
            metric.clear()
            for value, amount in values.items():
                metric.labels(value).set(amount)

    def __getitem__(self, name: str) -> float:
        """Of a counter or a gauge, all its labels together."""
        with self._lock:
            samples = [each for found in self._metrics[name].collect() for each in found.samples]
        return sum(each.value for each in samples)

    def text(self) -> str:
        """Prometheus' text format 0.0.4."""
        from prometheus_client import generate_latest

        with self._lock:
            return generate_latest(self._registry).decode()
