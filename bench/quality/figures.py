"""Figures of a summary: recall against bytes, accuracy against budget and depth, weak layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

# One colour for a family everywhere (Okabe and Ito's, told apart by the colour-blind).
COLOURS = {
    "full": "#000000",
    "kvswap": "#0072B2",
    "paper": "#E69F00",
    "oracle-groups": "#009E73",
    "oracle-tokens": "#56B4E9",
    "recent": "#D55E00",
    "snapkv": "#CC79A7",
    "random": "#999999",
}
STYLE = {
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
MARKS = {"groups": "o", "rank": "s", "group": "^", "memory": "D"}
DEPTH_BINS = 6
SHARES = (32, 13, 8, 4, 2, 1)  # ticks of memory, parts of the full cache
SHOWN = ("full", "kvswap", "kvswap:memory=1/13", "paper", "recent", "snapkv")
# One setting varied: what makes a curve, and its label.
CURVES = (
    ("kvswap", "groups", "kvswap, more groups", "-"),
    ("kvswap", "rank", "kvswap, more rank", "--"),
    ("kvswap", "group", "kvswap, larger groups", ":"),
    ("kvswap", "memory", "kvswap, lowered to a budget", "-."),
    ("oracle-groups", "groups", "best groups (needs the full cache)", "-"),
    ("recent", "memory", "recent and sinks", "-"),
    ("snapkv", "memory", "SnapKV-like", "-"),
)


def draw_all(summary: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Writes ``<name>_<figure>.png``; figures without anything to show are left out."""
    written = []
    with plt.rc_context(STYLE):
        for draw in (recall_by_bytes, accuracy_by_budget, accuracy_by_depth, recall_by_layer):
            figure = draw(summary["lengths"])
            if figure is None:
                continue
            path = folder / f"{name}_{draw.__name__}.png"
            figure.savefig(path, dpi=130, bbox_inches="tight")
            plt.close(figure)
            written.append(path)
    return written


def _grid_length(lengths: dict[str, Any]) -> str | None:
    """The longest length of those with most methods."""
    most = max((len(part["methods"]) for part in lengths.values()), default=0)
    best = [name for name, part in lengths.items() if len(part["methods"]) == most]
    return best[-1] if best else None


def _members(methods: dict[str, Any], family: str, setting: str) -> Iterator[dict[str, Any]]:
    """The family's methods that vary this setting alone, and the family as it is."""
    for name, method in methods.items():
        if name == family or (name.startswith(f"{family}:{setting}=") and "," not in name):
            yield method


def _recall(method: dict[str, Any]) -> float:
    return float(np.mean([layer[0] for layer in method["layers"]["recall"]]))


def recall_by_bytes(lengths: dict[str, Any]) -> Any:
    """Share of true attention mass against the bytes a token reads, reuse counted."""
    length = _grid_length(lengths)
    if length is None:
        return None
    methods = lengths[length]["methods"]
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    for family, setting, label, line in CURVES:
        points = [
            (m["bytes_chosen_per_token"], m["bytes_read_per_token"] / 1024, _recall(m))
            for m in _members(methods, family, setting)
            if m["bytes_read_per_token"]
        ]
        if len(points) > 1:
            # In order of what is chosen: with much of it kept from before, more may read less.
            _, x, y = zip(*sorted(points), strict=True)
            axes.plot(
                x,
                y,
                line,
                marker=MARKS[setting],
                ms=4,
                color=COLOURS[family],
                label=label,
                alpha=0.8,
            )
    for family in ("kvswap", "paper"):
        method = methods.get(family)
        if method and method["bytes_read_per_token"]:
            at = method["bytes_read_per_token"] / 1024, _recall(method)
            axes.plot(*at, marker="*", ms=13, color=COLOURS[family], zorder=5)
            axes.annotate(family, at, xytext=(7, -11), textcoords="offset points")
    if not axes.lines:
        plt.close(figure)
        return None
    axes.set(xscale="log", xlabel="KiB read per token, reuse counted", ylabel="attention mass held")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(f"Attention mass in what is attended, mean over layers, {int(length):,} tokens")
    axes.legend(loc="best")
    return figure


def accuracy_by_budget(lengths: dict[str, Any]) -> Any:
    """Exact answers against memory: needles, and the tasks that need many facts at once."""
    length = _grid_length(lengths)
    if length is None:
        return None
    methods = lengths[length]["methods"]
    shown = [task for task in ("needles", "multi-value", "json", "all") if _has(methods, task)]
    if not shown:
        return None
    width = 3.4 * len(shown)
    figure, panels = plt.subplots(1, len(shown), figsize=(width, 3.6), sharey=True, squeeze=False)
    for axes, task in zip(panels[0], shown, strict=True):
        for family, setting, label, line in CURVES:
            _budget_curve(axes, methods, (family, setting, label, line), task)
        full = methods["full"]["tasks"][task]["exact"][0]
        axes.axhline(full, color="black", lw=0.8, ls=":", label="full cache")
        axes.axvline(1 / 13, color="grey", lw=0.6)
        axes.set(xscale="log", xlabel="memory, share of the full cache", ylim=(-0.03, 1.03))
        axes.set(xlim=(1 / 40, 1.1))
        axes.set_xticks([1 / part for part in SHARES], [f"1/{part}" for part in SHARES])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(task)
    panels[0][0].set_ylabel(f"exact answers, {int(length):,} tokens")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
    return figure


def _has(methods: dict[str, Any], task: str) -> bool:
    return task in methods["full"]["tasks"]


def _budget_curve(axes: Any, methods: dict[str, Any], curve: tuple, task: str) -> None:
    family, setting, label, line = curve
    points = [
        (m["memory_share"], *m["tasks"][task]["exact"])
        for m in _members(methods, family, setting)
        if m["memory_share"]
    ]
    if len(points) < 2:
        return
    x, y, low, high = (np.array(column) for column in zip(*sorted(points), strict=True))
    axes.plot(
        x, y, line, marker=MARKS[setting], ms=4, color=COLOURS[family], label=label, alpha=0.8
    )
    axes.fill_between(x, low, high, color=COLOURS[family], alpha=0.07, lw=0)


def accuracy_by_depth(lengths: dict[str, Any]) -> Any:
    """The usual heat map: exact needles by where they lie, for each length and method."""
    names = [name for name in SHOWN if any(name in p["methods"] for p in lengths.values())]
    names = [
        name
        for name in names
        if any(p["methods"].get(name, {}).get("depths") for p in lengths.values())
    ]
    if not names:
        return None
    figure, panels = plt.subplots(
        1, len(names), figsize=(1.1 + 1.75 * len(names), 3.2), sharey=True, squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        table, counts = _depth_table(lengths, name)
        image = axes.imshow(table.T, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", origin="upper")
        for (x, y), value in np.ndenumerate(table):
            if counts[x, y]:
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6.5)
        axes.set_xticks(range(len(lengths)), [f"{int(n) // 1024}K" for n in lengths])
        axes.set_title(name.replace(":", "\n"), fontsize=8)
        axes.grid(False)
    edges = [f"{100 * i // DEPTH_BINS}-{100 * (i + 1) // DEPTH_BINS} %" for i in range(DEPTH_BINS)]
    panels[0][0].set_yticks(range(DEPTH_BINS), edges)
    panels[0][0].set_ylabel("depth of the needle")
    figure.supxlabel("tokens of document", fontsize=9, y=-0.02)
    figure.colorbar(image, ax=panels[0].tolist(), label="exact", shrink=0.9)
    return figure


def _depth_table(lengths: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    right, counts = np.zeros((2, len(lengths), DEPTH_BINS))
    for x, part in enumerate(lengths.values()):
        for depth, exact in part["methods"].get(name, {}).get("depths", ()):
            y = min(int(depth * DEPTH_BINS), DEPTH_BINS - 1)
            right[x, y] += exact
            counts[x, y] += 1
    with np.errstate(invalid="ignore"):
        return right / counts, counts


def recall_by_layer(lengths: dict[str, Any]) -> Any:
    """Recall of each layer with its interval: which layers are weak, and what prediction costs."""
    shown = {length: part for length, part in lengths.items() if "kvswap" in part["methods"]}
    if not shown:
        return None
    figure, panels = plt.subplots(
        1, len(shown), figsize=(0.6 + 3.1 * len(shown), 3.4), sharey=True, squeeze=False
    )
    drawn = (
        ("kvswap", "kvswap", "o"),
        ("kvswap:query=true", "kvswap, true query", "^"),
        ("paper", "paper", "s"),
        ("recent", "recent and sinks", "v"),
        ("random", "random groups", "x"),
    )
    for axes, (length, part) in zip(panels[0], shown.items(), strict=True):
        layers = np.arange(len(part["methods"]["kvswap"]["layers"]["recall"]))
        best = part["methods"]["kvswap"]["layers"]["best"]
        axes.bar(layers, best, color="#009E73", alpha=0.2, width=0.8, label="best groups")
        for i, (name, label, mark) in enumerate(drawn):
            if name in part["methods"]:
                _layer_points(axes, part["methods"][name], (name, label, mark), i)
        axes.set(xlabel="layer", ylim=(0, 1.02), title=f"{int(length):,} tokens")
        axes.set_xticks(layers)
    panels[0][0].set_ylabel("attention mass held")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=6)
    return figure


def _layer_points(axes: Any, method: dict[str, Any], style: tuple, number: int) -> None:
    name, label, mark = style
    mean, low, high = np.array(method["layers"]["recall"]).T
    at = np.arange(len(mean)) + 0.13 * (number - 2)
    colour = "#56B4E9" if name == "kvswap:query=true" else COLOURS[name]
    bars = np.stack([mean - low, high - mean]).clip(0)
    axes.errorbar(at, mean, bars, fmt=mark, ms=4, color=colour, lw=1, label=label)
