"""The side-by-side figure: milliseconds of a step by contender, one small picture for each cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.side_by_side.plan import DEFAULT, LABELS
from bench.side_by_side.report import FOLDER, load, title

COLUMNS = 3
COLOURS = {
    "kvswap": "#1b6ca8", "default": "#1b6ca8", "floor": "#9aa5b1",
    "static": "#c9a227", "dynamic": "#c9a227",
    "restore": "#b3541e", "mmap": "#b3541e", "tokens": "#6a4c93", "tokens_no_reuse": "#6a4c93",
}  # fmt: skip


def draw(folder: Path = FOLDER) -> Path | None:
    """ms_per_step.png beside the results; None when there are none."""
    results = load(folder)
    if not results:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(results) // COLUMNS)
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(5 * COLUMNS, 2.6 * rows), sharex=True, squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        _draw_cell(axis, result)
    figure.supxlabel("milliseconds of a step (a token of every sequence), log scale; |: its bound")
    figure.tight_layout()
    path = folder / "ms_per_step.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_cell(axis: Any, result: dict[str, Any]) -> None:
    keys = list(DEFAULT)[::-1]
    axis.set_xscale("log")
    for place, key in enumerate(keys):
        row = result["contenders"].get(key)
        if row is None:
            why = result["empty"].get(key, "not asked for")
            words = why.split(":")[0]
            axis.text(0.02, place, words[:48], va="center", fontsize=7, color="#777777",
                      transform=axis.get_yaxis_transform())  # fmt: skip
            continue
        low, high = row["ms_quartiles"]
        axis.plot([low, high], [place, place], color=COLOURS[key], linewidth=3, alpha=0.5)
        axis.plot(row["ms"], place, "o", color=COLOURS[key])
        axis.plot(row["roofline"]["ms"], place, "|", color="#333333", markersize=9)
    axis.set_yticks(range(len(keys)), [LABELS[key] for key in keys], fontsize=7)
    axis.set_ylim(-0.7, len(keys) - 0.3)
    axis.set_title(f"{title(result)}, {result['device']}", fontsize=9)
    axis.grid(axis="x", which="major", color="#dddddd")
    axis.set_axisbelow(True)
