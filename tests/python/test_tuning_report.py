"""The report: what it says of its numbers, that a page stands alone, and what it needs."""

import builtins
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvswap_torch.errors import ConfigError
from kvswap_torch.tuning import figures, report
from kvswap_torch.tuning.disk import DiskFigures, DiskModel, ReadCell
from kvswap_torch.tuning.points import Point, ReportData, neighbours, setting_text
from kvswap_torch.tuning.report import DATA, PICTURES, write_report


def point(group: int, rank: int, capacity: int, **changes: Any) -> Point:
    seconds = 4e-3 + rank * 1e-5 + 4e-4 * group
    parts = {"compute": 3e-3, "scoring": rank * 1e-5, "wait": seconds - 3e-3 - rank * 1e-5}
    fields: dict[str, Any] = {
        "setting": {"group_tokens": group, "rank": rank, "capacity": capacity},
        "rank_total": 2 * rank,
        "recall": 1 - 1 / rank,
        "bytes_per_token": 1e6 / capacity * group,
        "seconds_per_token": seconds,
        "parts": parts,
        "memory_bytes": 1000 * rank + capacity,
    }
    return Point(**{**fields, **changes})


def make_data(layers: int = 2) -> ReportData:
    cells = tuple(
        ReadCell(4096 << power, depth, 1e7 * (power + 1) * depth**0.5, 1e-4, 2e-4)
        for power in range(9)
        for depth in (1, 8, 64)
    )
    points = [
        point(4, 32, 600, chosen=True, solver="exhaustive"),
        point(2, 32, 600),
        point(4, 64, 600),
        point(4, 32, 1200, solver="greedy"),
        point(16, 8, 2400),
    ]
    return ReportData(
        disk=DiskFigures(cells, 5e8, True, "uring", "", 1 << 30, 512, 30.0, ()),
        disk_model=DiskModel(1e-5, 1e-4, 1e9, 0.0, 0.1),
        energy=[[1 - 0.9**r for r in range(1, 65)] for _ in range(layers)],
        recall={layer: {8: 0.5, 16: 0.6 + 0.01 * layer, 32: 0.9} for layer in range(layers)},
        reuse={"fifo": {400: 0.5, 600: 0.6, 1200: 0.7}, "lru": {400: 0.5, 600: 0.65, 1200: 0.8}},
        points=points,
        budget_bytes=60_000,
        recall_best=dict.fromkeys(range(layers), 0.95),
        ranks=[8] + [32] * (layers - 1),
        replacement="fifo",
        record_bytes=8192,
        facts={"model": "tiny <b>", "disk": "/fast & furious"},
        warnings=["probe: <something> [bold] was cut short"],
    )


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.images: list[dict[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, Any]]) -> None:
        if tag == "img":
            self.images.append(dict(attributes))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    return write_report(make_data(), tmp_path_factory.mktemp("report") / "new")


def test_the_page_needs_only_what_lies_beside_it(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert [image["src"] for image in page.images] == [picture.name for picture in PICTURES]
    for image in page.images:
        assert (written.parent / image["src"]).read_bytes().startswith(b"\x89PNG")
        assert len(image["alt"]) > 20
    assert "http" not in text and "<script" not in text


def test_the_page_says_what_was_chosen_and_escapes_what_it_is_told(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert "Chosen: G 4, rank 32, 600 kept." in text
    assert "tiny &lt;b&gt;" in text and "<b>" not in text
    assert "/fast &amp; furious" in text
    assert "probe: &lt;something&gt; [bold] was cut short" in text
    assert "Columns of the layers: 8, 32." in text
    (chosen,) = re.findall('<tr class="chosen">(.*)</tr>', text)
    cells = re.findall("<td>(.*?)</td>", chosen)
    assert cells[:3] == ["G 4, rank 32, 600 kept", "0.969", "169"] and "chosen" in cells[-1]
    assert "greedy" in text and "over the limit" in text


def test_titles_say_what_the_numbers_say(written: Path) -> None:
    titles = {
        image["src"]: image["alt"] for image in Page(written.read_text(encoding="utf-8")).images
    }
    assert "8 to 32 columns hold 70%" in titles["recall.png"]
    assert "layer 0 the least, 50%" in titles["recall.png"]
    assert "keeps 90% of its scores' variance with 22 columns" in titles["energy.png"]
    assert "With 600 tokens kept, 60% of the chosen groups need no read" in titles["reuse.png"]
    assert "lru would find 65%" in titles["reuse.png"]
    assert "A token takes 5.92 ms: 44% of it is waiting" in titles["time.png"]
    assert "recall 0.97 at 169 tokens per second; the fastest makes 195" in titles["trade_off.png"]
    assert "Single reads of 4 KiB get 10 MB/s, the best 720 MB/s" in titles["disk.png"]
    assert "off by 10%" in titles["disk.png"]


def test_the_parts_of_a_tokens_time_are_all_named_inside_the_picture() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = make_data()
    parts = dict.fromkeys((*figures.PARTS, "other"), 1e-3)
    points = [dataclasses.replace(each, parts=parts, shares_pages=True) for each in data.points]
    figure = Figure(figsize=(report.WIDTH, report.HEIGHT), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figures.draw_parts(axes, dataclasses.replace(data, points=points))
    canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(parts)
    box, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1
    assert whole.y0 <= box.y0 and box.y1 <= whole.y1
    assert max(text.get_window_extent().x1 for text in axes.texts) <= whole.x1


def test_equal_numbers_give_equal_files(written: Path, tmp_path: Path) -> None:
    again = write_report(make_data(), tmp_path)
    for path in sorted(written.parent.iterdir()):
        assert path.read_bytes() == (again.parent / path.name).read_bytes(), path.name


def test_the_numbers_are_kept_and_can_be_drawn_again(written: Path) -> None:
    kept = json.loads((written.parent / DATA).read_text())
    again = ReportData.from_json(kept)
    assert again == make_data()
    assert setting_text(again.chosen) == "G 4, rank 32, 600 kept"


def test_many_layers_and_little_data_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_report(make_data(layers=36), tmp_path / "many").is_file()
    data = make_data()
    lean = dataclasses.replace(
        data, points=[data.chosen], reuse={}, ranks=[], recall_best={}, record_bytes=0, facts={}
    )
    assert "nothing that fits" in write_report(lean, tmp_path / "few").read_text(encoding="utf-8")


def test_drawing_leaves_the_callers_matplotlib_alone(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    write_report(make_data(), tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        write_report(make_data(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_neighbours_differ_in_one_value_and_the_nearest_come_first() -> None:
    data = make_data()
    near = neighbours(data)
    assert [setting_text(p) for p in near] == [
        "G 2, rank 32, 600 kept",
        "G 4, rank 64, 600 kept",
        "G 4, rank 32, 1,200 kept",
    ]
    assert neighbours(data, 1) == near[:1]


def test_one_point_must_be_chosen() -> None:
    data = make_data()
    with pytest.raises(ConfigError, match="one point must be the chosen one, got 0"):
        dataclasses.replace(data, points=data.points[1:])
