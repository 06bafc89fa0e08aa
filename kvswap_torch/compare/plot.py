"""Accuracy against bytes of memory, as SVG of a few lines; the same results give the same file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

from kvswap_torch.memory_size import format_bytes

# Colours that the colour-blind tell apart (Okabe and Ito's).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 30, 60
TICKS = 5


@dataclass(frozen=True)
class Point:
    """A method in a budget."""

    name: str
    memory_bytes: float
    mean: float
    low: float
    high: float


def points(results: dict[str, Any]) -> list[Point]:
    """Of the methods that have a summary and memory."""
    return [
        Point(each["name"], each["summary"]["memory_bytes"], *each["summary"]["accuracy"])
        for each in results["methods"]
        if each.get("summary") and each["summary"]["memory_bytes"]
        and each["summary"]["accuracy"]
    ]  # fmt: skip


def draw(results: dict[str, Any]) -> str:
    """The plot's text."""
    shown = points(results)
    names = list(dict.fromkeys(point.name for point in shown))
    sizes = [math.log2(point.memory_bytes) for point in shown] or [20.0]
    low, high = min(sizes) - 0.3, max(sizes) + 0.3

    def x(size: float) -> float:
        return LEFT + (size - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title(results))}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for step in range(TICKS + 1):
        share = step / TICKS
        lines.append(_line(LEFT, y(share), WIDTH - RIGHT, y(share), "#dddddd"))
        lines.append(_text(LEFT - 8, y(share) + 4, f"{share:.1f}", "end"))
        size = low + share * (high - low)
        lines.append(_text(x(size), HEIGHT - BOTTOM + 18, format_bytes(round(2**size)), "middle"))
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        mine = sorted((p for p in shown if p.name == name), key=lambda p: p.memory_bytes)
        places = [(x(math.log2(point.memory_bytes)), point) for point in mine]
        path = " ".join(f"{at:.1f},{y(point.mean):.1f}" for at, point in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        for at, point in places:
            lines.append(_line(at, y(point.low), at, y(point.high), colour))
            lines.append(f'<circle cx="{at:.1f}" cy="{y(point.mean):.1f}" r="4" fill="{colour}"/>')
        height = TOP + 18 * number
        lines.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{height}" r="4" fill="{colour}"/>')
        lines.append(_text(WIDTH - RIGHT + 32, height + 4, name, "start"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(_text(middle, HEIGHT - 16, "memory of the KV cache, log scale (lower is better)",
                       "middle"))  # fmt: skip
    turned = f'transform="rotate(-90 18 {HEIGHT / 2:.0f})"'
    lines.append(_text(18, HEIGHT / 2, "accuracy (higher is better)", "middle", turned))
    return "\n".join([*lines, "</svg>"]) + "\n"


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
