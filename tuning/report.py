"""A report of a tuning: a page of pictures and a table that tell why these settings."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvswap_torch.memory_size import format_bytes
from kvswap_torch.tuning import figures
from kvswap_torch.tuning.points import WAIT, Point, ReportData, neighbours, setting_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "report.html"
DATA = "report.json"
WIDTH, HEIGHT, DPI = 8.6, 4.9, 110


@dataclass(frozen=True)
class Picture:
    """A picture: its file, who draws it, and what to look at."""

    name: str
    draw: Callable[[Axes, ReportData], str]
    caption: str


PICTURES = (
    Picture(
        "trade_off.png",
        figures.draw_trade,
        "Each dot is a setting. Further up finds more of what attention looks for, further left "
        "reads less, brighter is faster. Rings mark what was chosen.",
    ),
    Picture(
        "time.png",
        figures.draw_parts,
        "The chosen setting, then settings that differ from it in one value. Waiting is what "
        "reading ahead could not hide.",
    ),
    Picture(
        "recall.png",
        figures.draw_recall,
        "Measured on text that the projections were not fitted to. A layer whose line rises late "
        "needs more columns than one that is flat.",
    ),
    Picture(
        "energy.png",
        figures.draw_energy,
        "How well so many columns tell scores. Which layer needs them, recall tells, not this.",
    ),
    Picture(
        "reuse.png",
        figures.draw_reuse,
        "From choices recorded step by step and replayed: groups that are in memory already are "
        "not read again.",
    ),
    Picture(
        "disk.png",
        figures.draw_disk,
        "Random reads, submitted together. Solid: measured; dashed: the model that the solver "
        "uses. Small reads waste a disk, unless there are many at once.",
    ),
)


def write_report(data: ReportData, folder: str | Path) -> Path:
    """Draws the pictures and writes the page that shows them, and its numbers as JSON.

    Returns
    -------
    Path
        The page, ``report.html``; it needs nothing but the pictures beside it.

    Raises
    ------
    ImportError
        When matplotlib is not installed; says how to get it.
    """
    require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    titles = {picture.name: draw_picture(picture, data, folder) for picture in PICTURES}
    text = json.dumps(data.to_json(), indent=1, sort_keys=True)
    (folder / DATA).write_text(text + "\n", encoding="utf-8")
    page = folder / PAGE
    page.write_text(_page(data, titles), encoding="utf-8")
    return page


def draw_picture(picture: Picture, data: ReportData, folder: Path) -> str:
    """Draws one picture; returns its title, which is what it found."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e8eb",
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        # Not pyplot: it has a state that is shared with the caller's own pictures.
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        title = picture.draw(axes, data)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", wrap=True, pad=10)
        # Without a date or a version equal figures give equal files.
        figure.savefig(folder / picture.name, metadata={"Software": None})
    return title


def require_matplotlib() -> None:
    """That pictures can be drawn; an ImportError that says what to do where not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "report: needs matplotlib, which is not installed; run: pip install matplotlib, or ask "
            "for no report"
        ) from error


COLUMNS = ("setting", "recall", "tokens/s", "ms/token", "waiting", "read/token", "memory", "")


def _row(point: Point, data: ReportData) -> list[str]:
    wait = point.parts.get(WAIT, 0.0) / point.seconds_per_token
    told = ["chosen"] if point.chosen else []
    told += ["greedy"] if "greedy" in point.solver else []
    told += ["over the limit"] if point.memory_bytes > data.budget_bytes else []
    return [
        setting_text(point),
        f"{point.recall:.3f}",
        f"{point.tokens_per_s:.3g}",
        f"{1e3 * point.seconds_per_token:.3g}",
        f"{wait:.0%}",
        format_bytes(point.bytes_per_token),
        format_bytes(point.memory_bytes),
        ", ".join(told),
    ]


WORDS = (
    "G: tokens that are chosen and read together. Rank: columns of the summary that a layer's "
    "keys are scored by. Kept: tokens held in memory for each layer and sequence. Recall: share of "
    "the attention mass that the chosen tokens hold, the mean over layers."
)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2126; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
img { max-width: 100%; height: auto; border: 1px solid #e6e8eb; border-radius: 4px }
figure { margin: 1.6rem 0 } figcaption, .words { color: #555c64; font-size: .92rem }
table { border-collapse: collapse; font-size: .92rem }
td, th { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid #e6e8eb }
td:first-child, th:first-child { text-align: left }
.facts td { text-align: left; vertical-align: top } .facts td:first-child { white-space: nowrap }
tr.chosen { font-weight: bold; color: #c0392b }
.warning { background: #fff6e0; border-left: 4px solid #f0a202; padding: .4rem .8rem }
""".strip()


def _page(data: ReportData, titles: dict[str, str]) -> str:
    model = data.facts.get("model", "a model")
    shown = "\n".join(
        f'<figure><img src="{picture.name}" alt="{_text(titles[picture.name])}">'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
        for picture in PICTURES
    )
    warnings = "\n".join(f'<p class="warning">{_text(line)}</p>' for line in data.warnings)
    facts = "\n".join(
        f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>"
        for name, value in data.facts.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>KV cache settings for {_text(model)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>KV cache settings for {_text(model)}</h1>
<p>{_summary(data)}</p>
{warnings}
{_points_table(data)}
<p class="words">{_text(WORDS)}</p>
{shown}
<h2>Measured with</h2>
<table class="facts">
{facts}
</table>
</body>
</html>
"""


def _summary(data: ReportData) -> str:
    chosen = data.chosen
    ranks = ""
    if data.ranks:
        ranks = f" Columns of the layers: {', '.join(map(str, data.ranks))}."
    return _text(
        f"Chosen: {setting_text(chosen)}. Expected: {chosen.tokens_per_s:.3g} tokens per second "
        f"of a sequence, {chosen.recall:.1%} of the attention mass held, "
        f"{format_bytes(chosen.bytes_per_token)} read per token, "
        f"{format_bytes(chosen.memory_bytes)} of memory out of "
        f"{format_bytes(data.budget_bytes)} allowed.{ranks}"
    )


def _points_table(data: ReportData) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in COLUMNS)
    rows = "\n".join(
        f'<tr class="{"chosen" if point.chosen else "other"}">'
        + "".join(f"<td>{_text(cell)}</td>" for cell in _row(point, data))
        + "</tr>"
        for point in [data.chosen, *neighbours(data, 8)]
    )
    return f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))
