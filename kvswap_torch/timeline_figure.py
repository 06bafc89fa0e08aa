"""The last decoding step of a timeline, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvswap_torch.timeline import Span, Timeline

COLOURS = {
    "model": "#d9dde3",
    "predict": "#8e6bbf",
    "select": "#3b76c4",
    "plan": "#2aa198",
    "submit": "#7fd1b9",
    "wait": "#d1495b",
    "land": "#edae49",
    "attend": "#30638e",
    "append": "#8c9a3f",
    "seal": "#5b4b3a",
    "read": "#e07a3f",
    "write": "#777777",
}


def draw(timeline: Timeline, path: Path) -> Path:
    """`Timeline.figure`: the calling thread, the reads and the writes of the last step."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "timeline: a figure needs matplotlib, which is not installed; run: pip install "
            "matplotlib, or save() the trace and open it in Perfetto"
        ) from error
    steps = timeline.steps()
    if not steps:
        raise ValueError(
            "timeline: a figure must have a whole decoding step to show, got none; decode two "
            "tokens at least, or keep more spans (timeline_spans)"
        )
    begin, end = steps[-1][0].begin_ns, max(span.end_ns for span in steps[-1])
    shown = [s for s in timeline.spans if s.end_ns > begin and s.begin_ns < end]
    # Not pyplot: it has a state that is shared with the caller's own pictures.
    figure = Figure(figsize=(14, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    lanes = _lanes([span for span in shown if span.name == "read"])
    for span in shown:
        if span.name in COLOURS:
            row, height = _place(span, lanes)
            _bar(axes, span, begin, row, height)
    axes.set_xlim(0, (end - begin) * 1e-3)
    axes.set_ylim(-2.6, 1)
    axes.set_yticks([0.5, -0.75, -2.25], ["model and engine", "reads", "writes"])
    axes.set_xlabel("microseconds")
    hidden = timeline.overlap()
    title = f"One decoding step, {(end - begin) * 1e-6:.2f} ms"
    axes.set_title(title + ("" if hidden is None else f"; of all reads {hidden:.0%} hidden"))
    present = {span.name for span in shown}
    patches = [Patch(color=c, label=name) for name, c in COLOURS.items() if name in present]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path)
    return path


def _place(span: Span, lanes: dict[int, tuple[int, int]]) -> tuple[float, float]:
    """Bottom and height of a span's bar."""
    if span.name == "read":
        lane, count = lanes[id(span)]
        return -(lane + 1) * 1.5 / count, 1.5 / count
    return (-2.5, 0.5) if span.name == "write" else (0.0, 1.0)


def _lanes(reads: list[Span]) -> dict[int, tuple[int, int]]:
    """For each read a lane in which no other is under way, and the number of lanes."""
    ends: list[int] = []
    chosen: dict[int, int] = {}
    for span in reads:
        free = next((i for i, end in enumerate(ends) if end <= span.begin_ns), len(ends))
        ends[free : free + 1] = [span.end_ns]
        chosen[id(span)] = free
    return {key: (lane, len(ends)) for key, lane in chosen.items()}


def _bar(axes: Any, span: Span, zero: int, bottom: float, height: float) -> None:
    left, width = (span.begin_ns - zero) * 1e-3, (span.end_ns - span.begin_ns) * 1e-3
    axes.broken_barh([(left, width)], (bottom, height), facecolors=COLOURS[span.name], linewidth=0)
