"""What `KVSwapCache.stats(timeline=True)` recorded: where the time of each step went."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPANS = 16384  # 640 KiB; of the reference model 60 to 100 decoding steps

CALLER, READS, WRITES = 1, 2, 3  # tracks, the trace's thread ids


@dataclass(frozen=True)
class Span:
    """One stretch of time.

    Parameters
    ----------
    track
        `CALLER`, `READS` or `WRITES`.
    name
        On the calling thread: ``predict`` (the next layer's query), ``select`` (project, score,
        choose), ``plan`` (page maps; ``submit`` is a part of it), ``wait`` (for reads), ``land``
        (checksums), ``attend``, ``attend exactly`` (a long chunk), ``append``, ``seal``, and
        ``model``, all that lies between them. Of the disk: ``read``, ``fetch`` (the reads of one
        layer, from submission to the last byte), ``write``.
    layer
        -1 where it is not known.
    begin_ns, end_ns
        Since the oldest span that was kept.
    bytes
        Moved in it; 0 where nothing is counted.
    """

    track: int
    name: str
    layer: int
    begin_ns: int
    end_ns: int
    bytes: int


class Timeline:
    """The newest spans of a cache.

    Parameters
    ----------
    trace
        Trace events in the Chrome format, as the session writes them.

    Notes
    -----
    On a device only what the host does is recorded, no copies and no kernels.
    """

    def __init__(self, trace: dict[str, Any]):
        self.trace = trace
        self.spans = _spans(trace["traceEvents"])

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """What `save` wrote."""
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))

    def save(self, path: str | Path) -> Path:
        """Writes a Chrome trace: open it at https://ui.perfetto.dev or in chrome://tracing."""
        path = Path(path)
        path.write_text(json.dumps(self.trace), encoding="utf-8")
        return path

    def overlap(self) -> float | None:
        """Fraction of read time overlapped: the caller neither waited for reads nor submitted them.

        None without reads.
        """
        reads = _union((s.begin_ns, s.end_ns) for s in self.spans if s.name == "read")
        stands = _union((s.begin_ns, s.end_ns) for s in self.spans if s.name in ("wait", "submit"))
        reading = sum(end - begin for begin, end in reads)
        return 1 - _common(reads, stands) / reading if reading else None

    def seconds(self) -> dict[str, float]:
        """Seconds by name. On the calling thread those of spans inside are left out."""
        seconds: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.track != CALLER:
                seconds[span.name] += 1e-9 * (span.end_ns - span.begin_ns)
        for span, own in _own(self.spans):
            seconds[span.name] += 1e-9 * own
        return dict(seconds)

    def steps(self) -> list[list[Span]]:
        """The calling thread's spans of each decoding step, from one to the next, in order.

        A step begins where the first layer gets its new keys. Long chunks are no steps; nor is
        what follows the last beginning.
        """
        caller = [span for span in self.spans if span.track == CALLER]
        begins = [i for i, s in enumerate(caller) if s.name == "append" and s.layer == 0]
        steps = [caller[a:b] for a, b in itertools.pairwise(begins)]
        return [step for step in steps if all(span.name != "attend exactly" for span in step)]

    def per_step(self) -> dict[str, float]:
        """Microseconds of a decoding step by name, and their ``total``: medians over `steps`.

        Spans inside another are left out of it, so that a step's numbers add up to its total; what
        is between steps (sampling, the tokenizer) counts as ``model``.
        """
        rows = []
        for step in self.steps():
            row: dict[str, float] = defaultdict(float)
            for span, own in _own(step):
                row[span.name] += 1e-3 * own
            row["total"] = 1e-3 * (max(s.end_ns for s in step) - step[0].begin_ns)
            rows.append(row)
        names = sorted({name for row in rows for name in row})
        return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}

    def figure(self, path: str | Path) -> Path:
        """Draws the last decoding step as a PNG. Needs matplotlib.

        Raises
        ------
        ImportError
            When matplotlib is not installed; says how to get it.
        ValueError
            When no whole step was kept.
        """
        from kvswap_torch.timeline_figure import draw

        return draw(self, Path(path))

    def __str__(self) -> str:
        overlap = self.overlap()
        per_step = self.per_step()
        total = per_step.pop("total", 0.0)
        rows = [f"{'step':16}{total:10.0f} us, median of {len(self.steps())}"]
        for name, us in sorted(per_step.items(), key=lambda item: -item[1]):
            rows.append(f"  {name:14}{us:10.0f} us")
        hidden = "-" if overlap is None else f"{overlap:.1%}"
        return "\n".join([*rows, f"{'reads hidden':16}{hidden:>10}"])


def _spans(events: list[dict[str, Any]]) -> list[Span]:
    begun: dict[int, dict[str, Any]] = {}
    spans = []
    for event in events:
        if event["ph"] == "b":
            begun[event["id"]] = event
        elif event["ph"] == "e":
            first = begun.pop(event["id"])
            spans.append(_span(first, _ns(first["ts"]), _ns(event["ts"])))
        elif event["ph"] == "X":
            begin = _ns(event["ts"])
            spans.append(_span(event, begin, begin + _ns(event["dur"])))
    return sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns))


def _span(event: dict[str, Any], begin: int, end: int) -> Span:
    arguments = event["args"]
    return Span(
        event["tid"], event["name"], arguments["layer"], begin, end, arguments.get("bytes", 0)
    )


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _own(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """The calling thread's spans, which nest, with the time in which none was open inside."""
    open_spans: list[Span] = []
    own: list[list[Any]] = []
    index: dict[int, int] = {}
    for span in spans:
        if span.track != CALLER:
            continue
        while open_spans and open_spans[-1].end_ns <= span.begin_ns:
            open_spans.pop()
        if open_spans:
            own[index[id(open_spans[-1])]][1] -= span.end_ns - span.begin_ns
        index[id(span)] = len(own)
        own.append([span, span.end_ns - span.begin_ns])
        open_spans.append(span)
    return [(span, ns) for span, ns in own]


def _union(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(stretches):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    """Length of what both unions cover."""
    common = i = j = 0
    while i < len(one) and j < len(other):
        common += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common
