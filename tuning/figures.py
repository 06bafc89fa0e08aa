"""The pictures of a report: each draws into one set of axes and says what it found."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvswap_torch.memory_size import format_bytes
from kvswap_torch.tuning.disk import ReadCell
from kvswap_torch.tuning.points import WAIT, Point, ReportData, neighbours, setting_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHOSEN = "#c0392b"
QUIET = "#8a8f98"
# Uses of a token's time: color and words, in the order they are drawn.
PARTS = {
    "model": ("#2c5f8a", "the model itself"),
    "attend": ("#5b9bd5", "attention"),
    "select": ("#f0a202", "scoring"),
    "plan": ("#8e6bb5", "planning"),
    "append": ("#8fb996", "keeping new tokens"),
    "load": ("#c77b6a", "reading: what it takes of the cores"),
    WAIT: (CHOSEN, "waiting for the disk"),
}
SPARE = ("#3a9d8f", "#a0643c", "#d38fb8", "#6f7d2c", "#47627a", "#c7b446")
LINES_MAX = 8  # layers drawn as lines; more make a map
TICKS_MAX = 16  # columns of a map; where more were measured, powers of two are shown


def draw_disk(axes: Axes, data: ReportData) -> str:
    """Bandwidth over the size of a read, for each depth; the model in dashes."""
    depths = sorted({cell.depth for cell in data.disk.cells})
    for number, depth in enumerate(depths):
        cells = sorted(_at_depth(data, depth), key=lambda cell: cell.block_bytes)
        sizes = [cell.block_bytes for cell in cells]
        color = _shade("viridis", number, len(depths))
        axes.plot(
            sizes, [c.bytes_per_s / 1e6 for c in cells], marker="o", ms=4, lw=1.6, color=color,
            label=f"{depth}",
        )  # fmt: skip
        model = [depth * size / data.disk_model.seconds(depth, size) / 1e6 for size in sizes]
        axes.plot(sizes, model, ls=(0, (4, 3)), lw=1.0, color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({cell.block_bytes for cell in data.disk.cells})
    axes.set_xticks(sizes, [_short(size) for size in sizes])
    axes.set_xlabel("bytes of one read")
    axes.set_ylabel("MB/s")
    axes.yaxis.set_major_formatter(_plain_numbers())
    axes.yaxis.set_minor_formatter(_no_numbers())
    axes.plot([], [], ls=(0, (4, 3)), color=QUIET, label="model")
    if data.record_bytes:
        _mark_x(axes, data.record_bytes, f"a group: {format_bytes(data.record_bytes)}")
    axes.legend(title="reads at once", ncols=2, fontsize=9, title_fontsize=9, loc="lower right")
    best = max(data.disk.cells, key=lambda cell: cell.bytes_per_s)
    small = min(data.disk.cells, key=lambda cell: (cell.block_bytes, cell.depth))
    return (
        f"Single reads of {_short(small.block_bytes)} get {_rate(small.bytes_per_s)}, the best "
        f"{_rate(best.bytes_per_s)}; the model is off by {data.disk_model.residual:.0%}"
    )


def draw_energy(axes: Axes, data: ReportData) -> str:
    """The share of the scores' variance that so many columns keep, layer by layer."""
    tables = {layer: dict(enumerate(shares, start=1)) for layer, shares in enumerate(data.energy)}
    _draw_layers(axes, tables, data, "share of the scores' variance kept")
    needs = [
        next((rank for rank, share in table.items() if share >= 0.9), max(table))
        for table in tables.values()
    ]
    low, high = min(needs), max(needs)
    if low == high:
        return f"Every layer keeps 90% of its scores' variance with {low} columns"
    layer = needs.index(high)
    return f"90% of the scores' variance takes {low} to {high} columns, most in layer {layer}"


def draw_recall(axes: Axes, data: ReportData) -> str:
    """Attention mass that the chosen groups hold, by rank, layer by layer."""
    _draw_layers(axes, data.recall, data, "attention mass held by the chosen groups")
    if not data.ranks:
        return "What the chosen groups hold of the attention mass"
    held = {layer: table[_nearest(table, data.ranks[layer])] for layer, table in _ranked(data)}
    weakest = min(held, key=lambda layer: held[layer])
    mean = sum(held.values()) / len(held)
    few, many = min(data.ranks), max(data.ranks)
    ranks = f"{few} columns in every layer hold" if few == many else f"{few} to {many} columns hold"
    return (
        f"{ranks} {mean:.0%} of the attention mass; layer {weakest} the least, {held[weakest]:.0%}"
    )


def draw_reuse(axes: Axes, data: ReportData) -> str:
    """Share of chosen groups found in memory, by tokens kept, for each policy."""
    for number, (policy, table) in enumerate(sorted(data.reuse.items())):
        capacities = sorted(table)
        own = policy == data.replacement
        axes.plot(
            capacities, [100 * table[c] for c in capacities], marker="o", ms=4,
            lw=2.4 if own else 1.4, color=CHOSEN if own else SPARE[number % len(SPARE)],
            label=policy + (" (chosen)" if own else ""), zorder=3 if own else 2,
        )  # fmt: skip
    axes.set_xlabel("tokens kept in memory, per layer and sequence")
    axes.set_ylabel("chosen groups found there, %")
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(_thousands())
    if data.reuse:
        axes.legend(fontsize=9, loc="lower right")
    capacity = data.chosen.setting.get("capacity")
    table = data.reuse.get(data.replacement)
    if not capacity or not table:
        return "How much of a step's choice is in memory already"
    _mark_x(axes, capacity, f"{capacity:,} kept")
    rates = {policy: each[_nearest(each, capacity)] for policy, each in data.reuse.items()}
    best = max(sorted(rates), key=lambda policy: rates[policy])
    own = rates[data.replacement]
    tail = (
        "no policy finds more"
        if rates[best] - own < 0.005
        else f"{best} would find {rates[best]:.0%}"
    )
    return f"With {capacity:,} tokens kept, {own:.0%} of the chosen groups need no read; {tail}"


def draw_parts(axes: Axes, data: ReportData) -> str:
    """Where a token's time goes, for the chosen setting and its neighbours."""
    points = [data.chosen, *neighbours(data)]
    names = list(dict.fromkeys(name for point in points for name in point.parts))
    known = [name for name in PARTS if name in names]
    others = [name for name in names if name not in PARTS]
    names = sorted([*known, *others], key=lambda name: name == WAIT)  # waiting comes last
    spare = iter(SPARE * len(names))
    left = [0.0] * len(points)
    for name in names:
        widths = [1e3 * point.parts.get(name, 0.0) for point in points]
        color, label = PARTS.get(name) or (next(spare), name.replace("_", " "))
        axes.barh(
            range(len(points)), widths, left=left, height=0.68, label=label, color=color,
            edgecolor="white", linewidth=0.6,
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, (end, point) in enumerate(zip(left, points, strict=True)):
        axes.text(
            end + 0.01 * max(left), row, f"{end:.3g} ms, recall {point.recall:.2f}", va="center",
            fontsize=9, color=CHOSEN if point.chosen else "black",
        )  # fmt: skip
    texts = [setting_text(point) + _remark(point, data) for point in points]
    axes.set_yticks(range(len(points)), texts)
    axes.get_yticklabels()[0].set_color(CHOSEN)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(left))
    axes.set_xlabel("milliseconds per token")
    axes.grid(axis="y", visible=False)
    # Of the figure: centred below long labels of settings it would leave the picture.
    axes.get_figure(root=True).legend(fontsize=9, ncols=3, loc="outside lower center")
    chosen = data.chosen
    wait = chosen.parts.get(WAIT, 0.0) / chosen.seconds_per_token
    waits = f"{wait:.0%} of it is waiting for the disk" if wait >= 0.005 else "the disk keeps up"
    return f"A token takes {1e3 * chosen.seconds_per_token:.3g} ms: {waits}"


def _remark(point: Point, data: ReportData) -> str:
    if point.chosen:
        return " (chosen)"
    return " (too large)" if point.memory_bytes > data.budget_bytes else ""


def draw_trade(axes: Axes, data: ReportData) -> str:
    """Recall against bytes read and speed, the chosen point marked."""
    fits = [point for point in data.points if point.memory_bytes <= data.budget_bytes]
    over = [point for point in data.points if point.memory_bytes > data.budget_bytes]
    if over:
        axes.scatter(
            [_kib(point) for point in over], [point.recall for point in over], s=22,
            facecolors="none", edgecolors="#c9cdd3", label="over the memory limit", zorder=1,
        )  # fmt: skip
    shown = axes.scatter(
        [_kib(point) for point in fits], [point.recall for point in fits], s=42,
        c=[point.tokens_per_s for point in fits], cmap="viridis", edgecolors="white",
        linewidths=0.5, zorder=2,
    )  # fmt: skip
    axes.figure.colorbar(shown, ax=axes, label="tokens per second of a sequence", pad=0.02)
    for point in data.points:
        if "greedy" in point.solver and not point.chosen:
            _ring(axes, point, "D", "#1f1f1f", "the paper's greedy solver")
    _ring(axes, data.chosen, "o", CHOSEN, "chosen: " + setting_text(data.chosen))
    axes.set_xlabel("KiB read from the disk per token of a sequence")
    axes.set_ylabel("recall: attention mass held by the chosen groups")
    axes.margins(0.08)
    axes.xaxis.set_major_formatter(_thousands())
    axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    return _trade_title(data.chosen, fits)


def _trade_title(chosen: Point, fits: Sequence[Point]) -> str:
    text = f"Chosen: recall {chosen.recall:.2f} at {chosen.tokens_per_s:.3g} tokens per second"
    fastest = max(fits, key=lambda point: point.tokens_per_s, default=chosen)
    if fastest.tokens_per_s > 1.02 * chosen.tokens_per_s:
        return f"{text}; the fastest makes {fastest.tokens_per_s:.3g}, with {fastest.recall:.2f}"
    better = max(fits, key=lambda point: point.recall, default=chosen)
    if better.recall > chosen.recall + 0.005:
        return f"{text}; {better.recall:.2f} would cost {_slower(chosen, better)}"
    return f"{text}: nothing that fits is faster or holds more"


def _slower(chosen: Point, other: Point) -> str:
    return f"{1 - other.tokens_per_s / chosen.tokens_per_s:.0%} of the speed"


def _draw_layers(
    axes: Axes, tables: dict[int, dict[int, float]], data: ReportData, label: str
) -> None:
    """Lines for few layers, a map for many; the chosen ranks marked."""
    if len(tables) <= LINES_MAX:
        _draw_lines(axes, tables, data, label)
    else:
        _draw_map(axes, tables, data, label)


def _draw_lines(
    axes: Axes, tables: dict[int, dict[int, float]], data: ReportData, label: str
) -> None:
    for number, (layer, table) in enumerate(sorted(tables.items())):
        color = _shade("plasma", number, len(tables))
        ranks = sorted(table)
        axes.plot(ranks, [table[r] for r in ranks], lw=1.8, color=color, label=f"layer {layer}")
        if layer < len(data.ranks):
            rank = _nearest(table, data.ranks[layer])
            axes.plot([rank], [table[rank]], "o", ms=9, mfc=color, mec="black", zorder=4)
    axes.plot([], [], "o", mfc="white", mec="black", ms=8, label="chosen rank")
    least = min(min(table) for table in tables.values())
    most = max(max(table) for table in tables.values())
    if tables is data.recall and data.recall_best:
        for number, layer in enumerate(sorted(tables)):
            color = _shade("plasma", number, len(tables))
            axes.plot([1.12 * most], [data.recall_best[layer]], "_", ms=13, mew=2.2, color=color)
        axes.plot([], [], "_", ms=11, mew=2.2, color=QUIET, label="best choice possible")
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9 * least, 1.2 * most)
    ticks = [tick for tick in _powers(most) if tick >= least]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("columns of the summary (rank)")
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_map(
    axes: Axes, tables: dict[int, dict[int, float]], data: ReportData, label: str
) -> None:
    layers = sorted(tables)
    ticks = sorted(set.intersection(*(set(table) for table in tables.values())))
    if len(ticks) > TICKS_MAX:
        ticks = [tick for tick in _powers(ticks[-1]) if tick in ticks]
    grid = [[tables[layer][rank] for rank in ticks] for layer in layers]
    shown = axes.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=1, origin="lower")
    axes.figure.colorbar(shown, ax=axes, label=label, pad=0.02)
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    step = max(1, len(layers) // 12)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    rows = [row for row, layer in enumerate(layers) if layer < len(data.ranks)]
    places = [_place(ticks, data.ranks[layers[row]]) for row in rows]
    axes.plot(places, rows, "o", ms=6, mfc="white", mec=CHOSEN, mew=1.6, label="chosen rank")
    axes.set_xlabel("columns of the summary (rank)")
    axes.set_ylabel("layer")
    axes.grid(visible=False)
    if rows:
        axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _place(ticks: Sequence[int], rank: int) -> float:
    """Where a rank lies between the columns of a map."""
    for at, (low, high) in enumerate(pairwise(ticks)):
        if low <= rank <= high:
            return at + (rank - low) / (high - low)
    return 0.0 if rank < ticks[0] else len(ticks) - 1.0


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(21) if 1 << power <= most]


def _nearest(table: dict[int, float], value: int) -> int:
    return min(table, key=lambda known: (abs(known - value), known))


def _ranked(data: ReportData) -> list[tuple[int, dict[int, float]]]:
    return [
        (layer, table) for layer, table in sorted(data.recall.items()) if layer < len(data.ranks)
    ]


def _ring(axes: Axes, point: Point, marker: str, color: str, label: str) -> None:
    axes.scatter(
        [_kib(point)], [point.recall], s=190, marker=marker, facecolors="none", edgecolors=color,
        linewidths=2.2, label=label, zorder=4,
    )  # fmt: skip


def _mark_x(axes: Axes, x: float, text: str) -> None:
    axes.axvline(x, color=CHOSEN, lw=1.2, ls=":", zorder=1)
    axes.annotate(
        " " + text, (x, 0.985), xycoords=("data", "axes fraction"), color=CHOSEN, fontsize=9,
        va="top",
    )  # fmt: skip


def _at_depth(data: ReportData, depth: int) -> list[ReadCell]:
    return [cell for cell in data.disk.cells if cell.depth == depth]


def _kib(point: Point) -> float:
    return point.bytes_per_token / 1024


def _short(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _rate(bytes_per_s: float) -> str:
    return (
        f"{bytes_per_s / 1e9:.2g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    )


def _shade(name: str, number: int, count: int) -> Any:
    import matplotlib

    return matplotlib.colormaps[name](0.9 * number / max(1, count - 1))


def _plain_numbers() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:g}")


def _thousands() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}")


def _no_numbers() -> Any:
    from matplotlib.ticker import NullFormatter

    return NullFormatter()
