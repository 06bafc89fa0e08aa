"""The plots of docs/benchmarks: SVG whose bytes depend on results and matplotlib alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from bench.pages.presets import SHARE
from bench.quality.methods import FULL
from bench.quality.plan import preset_method
from bench.side_by_side.plan import label
from bench.side_by_side.report import title
from kvswap_torch.preset import presets

# Colours that the colour-blind tell apart (Okabe and Ito's).
COLOURS = {
    "kvswap": "#56B4E9", "default": "#0072B2", "static": "#E69F00", "restore": "#D55E00",
    "floor": "#999999",
}  # fmt: skip
NAMES = {"kvswap": "published settings", "default": "defaults"}
DEPTHS = 6  # bins
OF_DEPTH = (FULL, "kvswap", "quest", "snapkv", "streaming")
MARKS = "osD^v"
STYLE = {
    "svg.hashsalt": "kvswap",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
Result = dict[str, Any]


def draw_all(folder: Path, cells: list[Result], real: list[Result], of_presets: Result) -> None:
    """Writes the four plots."""
    drawn = {
        "speed": lambda axes: speed(axes, cells),
        "depth": lambda axes: depth(axes, of_presets),
        "real": lambda axes: kept(axes, real),
        "presets": lambda axes: by_bytes(axes, of_presets),
    }
    with pyplot.rc_context(STYLE):
        for name, draw in drawn.items():
            figure, axes = pyplot.subplots(figsize=(7.2, 3.8))
            draw(axes)
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


def speed(axes: Any, cells: list[Result]) -> None:
    """Milliseconds of a step, a line a cell."""
    for key, colour in COLOURS.items():
        points = [
            (cell["contenders"][key]["ms"], place)
            for place, cell in enumerate(cells)
            if key in cell["contenders"]
        ]
        name = NAMES.get(key, label(key))
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=name)
    names = [f"{title(cell)}, {cell['device']}" for cell in cells]
    axes.set_yticks(range(len(cells)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds per step, log scale (lower is better)")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=len(COLOURS))


def depth(axes: Any, part: Result) -> None:
    """Needles found by where they lie, by presets that read and by presets that evict."""
    for number, name in enumerate(OF_DEPTH):
        method = part["methods"][name if name == FULL else preset_method(name, SHARE)]
        bins: list[list[float]] = [[] for _ in range(DEPTHS)]
        for place, right in method["depths"]:
            bins[min(DEPTHS - 1, int(DEPTHS * place))].append(right)
        points = [((i + 0.5) / DEPTHS, sum(b) / len(b)) for i, b in enumerate(bins) if b]
        words = "full cache, all of the memory" if name == FULL else f"{name}, {SHARE}"
        style = {"marker": MARKS[number], "color": f"C{number}", "label": words}
        axes.plot(*zip(*points, strict=True), "-", ms=5, alpha=0.8, **style)
    axes.set_ylim(-0.05, 1.05)
    axes.set_xlabel("depth of the fact in the document (0: first token, 1: last)")
    axes.set_ylabel("share of needles found\n(higher is better)")
    axes.legend(fontsize=8, loc="center left")


def kept(axes: Any, results: list[Result]) -> None:
    """Answers that stay right on the real model, by length and settings, with intervals."""
    best: dict[tuple[int, str], tuple[int, list[float]]] = {}
    for result in results:
        for length, part in result["lengths"].items():
            for name, method in part["methods"].items():
                if name != FULL and part["documents"] > best.get((int(length), name), (0, []))[0]:
                    found = part["documents"], method["tasks"]["asked"]["kept"]
                    best[int(length), name] = found
    places = sorted(best, key=lambda key: (key[0], "config" in key[1], key[1]))
    for place, key in enumerate(places):
        mean, low, high = best[key][1]
        colour = "C1" if "config" in key[1] else "C0"
        axes.errorbar(place, mean, [[mean - low], [high - mean]], fmt="o", color=colour, capsize=3)
    words = [
        f"{length:,}\n{'tuned' if 'config' in name else 'defaults'}\n{name.partition('memory=')[2]}"
        for length, name in places
    ]
    axes.set_xticks(range(len(places)), words, fontsize=8)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share of the full cache's\nright answers kept\n(higher is better)")


def by_bytes(axes: Any, part: Result) -> None:
    """Right answers of each preset that fits, against the bytes that a token reads."""
    points: dict[tuple[int, int], list[str]] = {}
    for preset in presets():
        method = part["methods"].get(preset_method(preset.name, SHARE))
        if method is not None:
            mib = method["bytes_read_per_token"] / 2**20
            right = method["tasks"]["all"]["exact"][0]
            points.setdefault((round(mib), round(right)), []).append(preset.name)
            axes.plot(mib, right, "o", color="C0")
    for (mib, right), names in points.items():
        words = "\n".join(", ".join(names[i : i + 4]) for i in range(0, len(names), 4))
        side = ("right", "top", 30) if right else ("left", "bottom", 0)
        axes.annotate(words, (mib, right - 0.02 if right else 0.1), fontsize=8, ha=side[0],
                      va=side[1], rotation=side[2])  # fmt: skip
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.1, 200)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("MiB read per token, log scale above 1 (lower is better)")
    axes.set_ylabel("share of right answers\n(higher is better)")
