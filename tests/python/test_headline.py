"""README's table: time and answers of a line are of one configuration; what is faster is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from bench import headline
from bench.machine import RESULTS
from bench.table import TABLES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RANKS = [32] * 4
SPEED: dict[str, Any] = {
    "model": "smollm2",
    "tokens": 4152,
    "methods": {
        "product:memory=1/8": {
            "ms": 40.0, "memory_share": 0.125, "ranks": RANKS, "summary_dtype": "int4",
            "groups_max": 100, "group_tokens": 4,
        },
        "product:config=tuned.json,memory=1/8": {"ms": 1.0, "memory_share": 0.125},
        "full": {"ms": 100.0},
    },
}  # fmt: skip
QUALITY: dict[str, Any] = {
    "product:memory=1/8": {
        "ranks": RANKS, "summary_dtype": "int4", "groups_per_step": 100.0, "selected_tokens": 400,
        "tasks": {"asked": {"kept": [0.9, 0.8, 1.0]}},
    },
}  # fmt: skip


def cell(**ms: float) -> dict[str, Any]:
    rows = {name: {"ms": each, "kv_memory_bytes": 1 << 20} for name, each in ms.items()}
    return {
        "shape": "1b", "layers": 4, "context": 8192, "batch": 8, "kv_bytes_full": 13 << 20,
        "choices": "smollm2",
        "contenders": rows,
    }  # fmt: skip


def test_the_table_in_the_readme_is_the_generated_one() -> None:
    shown = README.split("<!-- bench:headline -->\n")[1].split("\n<!-- /bench:headline -->")[0]
    assert TABLES["headline"] is headline.rows
    assert shown == "\n".join(headline.rows())


def test_time_and_answers_of_the_same_settings_stand_in_one_line() -> None:
    (line,) = headline.real_lines(SPEED, QUALITY)
    assert (line.ms, line.kept, line.full_ms) == (40.0, (0.9, 0.8, 1.0), (100.0, "DynamicCache"))
    assert line.cells()[-2:] == ["0.90 (0.80 to 1.00)", "nothing"]


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": [64] * 4},
        {"summary_dtype": "int8"},
        {"groups_max": 200},
        {"groups_max": 200, "group_tokens": 2},
    ],
    ids=str,
)
def test_answers_of_other_settings_are_not_measured(change: dict[str, Any]) -> None:
    speed = copy.deepcopy(SPEED)
    speed["methods"]["product:memory=1/8"] |= change
    (line,) = headline.real_lines(speed, QUALITY)
    assert line.kept is None and "not measured" in line.cells()
    (line,) = headline.real_lines(SPEED, {})
    assert line.kept is None


def test_what_is_faster_is_said_in_the_line_and_the_floor_is_no_cache() -> None:
    mine, published = headline.shape_lines(
        cell(kvswap=60.0, default=200.0, floor=1.0, static=100.0, dynamic=900.0, mmap=150.0)
    )
    assert mine.faster == "StaticCache (100.0), mmap (150.0)" and mine.ms == 200.0
    assert published.faster == "nothing" and published.ms == 60.0
    assert mine.full_ms == published.full_ms == (100.0, "StaticCache")
    assert mine.kept is published.kept is None, "random weights have no right answers"


def test_no_line_mixes_two_runs_of_two_configurations() -> None:
    """The published form is fast and answers nothing: each is said where it was measured."""
    lines = list(headline.lines(RESULTS))
    published = [line for line in lines if line.settings == headline.PUBLISHED]
    assert any(line.ms is not None for line in published)
    assert [line.kept for line in published if line.kept is not None] == [(0.0, 0.0, 0.0)]
    assert all(line.ms is None for line in published if line.kept is not None)
    slower = [line for line in lines if line.full_ms and line.ms > line.full_ms[0]]
    assert slower != [] and all(line.full_ms[1] in line.faster for line in slower)
    shown = README.split("<!-- bench:headline -->")[1].split("<!-- /bench:headline -->")[0]
    assert "x)" not in shown, "a ratio without what it is of reads as a gain"
