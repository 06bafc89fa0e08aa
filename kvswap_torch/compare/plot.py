"""Accuracy against memory, bytes read and time, as SVG; the same results give the same file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from kvswap_torch.memory_size import format_bytes

# Colours that the colour-blind tell apart (Okabe and Ito's).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
WIDTH, HEIGHT = 760, 420  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 30, 60
LEGEND_STEP = 18
TICKS = 5


@dataclass(frozen=True)
class Axis:
    """What a panel has from left to right, on a log scale.

    Attributes
    ----------
    key
        In a method's summary.
    """

    key: str
    label: str
    form: Callable[[float], str]


AXES = (
    Axis("memory_bytes", "memory of the KV cache", lambda value: format_bytes(round(value))),
    Axis("bytes_read_per_token", "bytes read per token", lambda value: format_bytes(round(value))),
    Axis("ms_per_token", "ms per token", lambda value: f"{value:.3g}"),
)


@dataclass(frozen=True)
class Point:
    """A method in a budget; `value` is of the axis."""

    name: str
    value: float
    mean: float
    low: float
    high: float


def points(results: dict[str, Any], axis: Axis = AXES[0]) -> list[Point]:
    """Of the methods that have a summary and a value."""
    return [
        Point(each["name"], each["summary"][axis.key], *each["summary"]["accuracy"])
        for each in results["methods"]
        if each.get("summary") and each["summary"].get(axis.key) is not None
        and each["summary"]["accuracy"]
    ]  # fmt: skip


def draw(results: dict[str, Any]) -> str:
    """The plot's text: a panel for each of `AXES`, with one legend."""
    names = list(dict.fromkeys(each["name"] for each in results["methods"] if each.get("summary")))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    height = max(len(AXES) * HEIGHT, TOP + LEGEND_STEP * len(names))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title(results))}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, axis in enumerate(AXES):
        panel = _Panel(axis, points(results, axis), number * HEIGHT)
        lines += [*panel.frame(), *panel.curves(colours)]
    for number, (name, colour) in enumerate(colours.items()):
        at = TOP + LEGEND_STEP * number
        lines.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{at}" r="4" fill="{colour}"/>')
        lines.append(_text(WIDTH - RIGHT + 32, at + 4, name, "start"))
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Panel:
    """One axis; what is 0 on it, which has no logarithm, stands at its left end."""

    def __init__(self, axis: Axis, shown: list[Point], top: int):
        self._axis, self._shown, self._top = axis, shown, top
        sizes = [math.log2(point.value) for point in shown if point.value > 0] or [20.0]
        self._has_zero = any(point.value <= 0 for point in shown)
        self._low = min(sizes) - (1.5 if self._has_zero else 0.3)
        self._high = max(sizes) + 0.3

    def _x(self, size: float) -> float:
        return LEFT + (size - self._low) / (self._high - self._low) * (WIDTH - LEFT - RIGHT)

    def _at(self, point: Point) -> float:
        return self._x(math.log2(point.value) if point.value > 0 else self._low)

    def _y(self, share: float) -> float:
        return self._top + TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    def frame(self) -> Iterator[str]:
        """Lines, ticks and labels."""
        for step in range(TICKS + 1):
            share = step / TICKS
            yield _line(LEFT, self._y(share), WIDTH - RIGHT, self._y(share), "#dddddd")
            yield _text(LEFT - 8, self._y(share) + 4, f"{share:.1f}", "end")
            size = self._low + share * (self._high - self._low)
            is_zero = self._has_zero and step == 0
            label = self._axis.form(0.0 if is_zero else 2**size)
            yield _text(self._x(size), self._top + HEIGHT - BOTTOM + 18, label, "middle")
        middle, below = (LEFT + WIDTH - RIGHT) / 2, self._top + HEIGHT - 16
        label = f"{self._axis.label}, log scale (lower is better)"
        yield _text(middle, below, label, "middle")
        centre = self._top + HEIGHT / 2
        turned = f'transform="rotate(-90 18 {centre:.0f})"'
        yield _text(18, centre, "accuracy (higher is better)", "middle", turned)

    def curves(self, colours: dict[str, str]) -> Iterator[str]:
        """A line for each method, with the intervals of its budgets."""
        for name, colour in colours.items():
            mine = sorted((p for p in self._shown if p.name == name), key=lambda p: p.value)
            if not mine:
                continue
            path = " ".join(f"{self._at(p):.1f},{self._y(p.mean):.1f}" for p in mine)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}"/>'
            for point in mine:
                at, mean = self._at(point), self._y(point.mean)
                yield _line(at, self._y(point.low), at, self._y(point.high), colour)
                yield f'<circle cx="{at:.1f}" cy="{mean:.1f}" r="4" fill="{colour}"/>'


def title(results: dict[str, Any]) -> str:
    """What was compared."""
    data, model = results["data"], results.get("model") or {}
    return (
        f"{model.get('name', 'a model')}: {data.get('questions', '?')} questions about "
        f"{data.get('documents', '?')} documents"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'
