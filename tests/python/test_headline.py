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
            "groups_max": 100, "group_tokens": 4, "prefetch": "verify",
        },
        "product:memory=1/8,prefetch.mode=off": {"ms": 50.0, "memory_share": 0.125},
        "product:config=here/tuned.json,memory=1/8": {
            "ms": 30.0, "memory_share": 0.1, "ranks": [16] * 4, "summary_dtype": "int4",
            "groups_max": 200, "group_tokens": 2, "prefetch": "verify",
        },
        "full": {"ms": 100.0},
    },
}  # fmt: skip
QUALITY: dict[str, Any] = {
    "product:memory=1/8": {
        "ranks": RANKS, "summary_dtype": "int4", "groups_per_step": 100.0, "selected_tokens": 400,
        "memory_share": 0.125,
        "tasks": {"asked": {"kept": [0.9, 0.8, 1.0]}, "language": {"kl": [0.012, 0.0, 0.1]}},
    },
}  # fmt: skip
TUNED: dict[str, Any] = {
    "product:config=there/tuned.json,memory=1/8": {
        "ranks": [16] * 4, "summary_dtype": "int4", "groups_per_step": 200.0,
        "selected_tokens": 400, "memory_share": 0.1,
        "tasks": {"asked": {"kept": [0.95, 0.9, 1.0]}, "language": {"kl": [0.02, 0.0, 0.1]}},
    },
}  # fmt: skip


def cell(**ms: float) -> dict[str, Any]:
    facts = {"kv_memory_bytes": 1 << 20, "config": {"prefetch": "verify"}}
    facts |= {"parts_ms": {"predict": 0.5}}
    rows = {name: {"ms": each} | copy.deepcopy(facts) for name, each in ms.items()}
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
    (line,) = headline.real_lines(SPEED, QUALITY, "4096")
    assert (line.ms, line.kept, line.full_ms) == (40.0, (0.9, 0.8, 1.0), (100.0, "DynamicCache"))
    assert (line.settings, line.kl) == ("defaults", 0.012)
    assert line.cells()[-3:] == ["0.90 (0.80 to 1.00)", "0.012", "nothing"]


def test_tuned_settings_have_a_line_of_their_answers_and_the_time_of_the_same() -> None:
    """Matched by what was measured, whatever the files are called."""
    _, line = headline.real_lines(SPEED, QUALITY | TUNED, "4096")
    assert line.cells() == [
        "tuned", "SmolLM2-135M, 4,152, 1", "1/10.0", "30.0", "100.0 (DynamicCache)",
        "0.95 (0.90 to 1.00)", "0.020", "nothing",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"ranks": [24] * 4}, {"groups_max": 100}, {"prefetch": "trust"}], ids=str
)
def test_a_time_of_other_tuned_settings_is_left_out(change: dict[str, Any]) -> None:
    """Answers stay, without a time; trusted predictions select otherwise than verified ones."""
    speed = copy.deepcopy(SPEED)
    speed["methods"]["product:config=here/tuned.json,memory=1/8"] |= change
    _, line = headline.real_lines(speed, QUALITY | TUNED, "4096")
    assert (line.ms, line.full_ms, line.kept) == (None, None, (0.95, 0.9, 1.0))
    none = "not measured"
    assert line.cells()[1:5] == ["SmolLM2-135M, 4,096, 1", "1/10.0", none, none]
    assert line.faster == none
    assert len(list(headline.real_lines(speed, QUALITY, "4096"))) == 1, "no time without answers"


def test_the_faster_of_two_full_caches_is_the_one_to_beat() -> None:
    speed = copy.deepcopy(SPEED)
    speed["methods"]["static"] = {"ms": 35.0}
    line, tuned = headline.real_lines(speed, QUALITY | TUNED, "4096")
    assert line.full_ms == tuned.full_ms == (35.0, "StaticCache")
    assert line.faster == "StaticCache (35.0)" and tuned.faster == "nothing"


def test_what_did_not_fit_has_no_line() -> None:
    speed = copy.deepcopy(SPEED)
    speed["methods"]["product:memory=1/500"] = {"impossible": "must be at least"}
    assert len(list(headline.real_lines(speed, QUALITY, "4096"))) == 1


def test_a_line_without_prefetch_says_so() -> None:
    """Results that do not say how they prefetched are older than the prefetch."""
    for mode in ("off", None):
        speed = copy.deepcopy(SPEED)
        speed["methods"]["product:memory=1/8"]["prefetch"] = mode
        if mode is None:
            del speed["methods"]["product:memory=1/8"]["prefetch"]
        (line,) = headline.real_lines(speed, QUALITY, "4096")
        assert line.settings == "defaults, no prefetch"
    marked = {}
    for config, predict in (({}, 0.0), ({}, 0.2), ({"prefetch": "off"}, 0.2),
                            ({"prefetch": "verify"}, 0.0)):  # fmt: skip
        result = cell(kvswap=60.0, default=200.0, static=100.0)
        result["contenders"]["default"] |= {"config": config, "parts_ms": {"predict": predict}}
        mine, _ = headline.shape_lines(result)
        marked[str(config), predict] = mine.settings
    assert list(marked.values()) == [
        "defaults, no prefetch", "defaults", "defaults, no prefetch", "defaults",
    ]  # fmt: skip


def test_quality_without_the_texts_divergence_says_that_it_was_not_measured() -> None:
    for language in (None, {"loss": [1.0, 0.0, 2.0]}, {"kl": None}):
        quality = copy.deepcopy(QUALITY)
        tasks = quality["product:memory=1/8"]["tasks"]
        tasks.pop("language") if language is None else tasks.update(language=language)
        (line,) = headline.real_lines(SPEED, quality, "4096")
        assert line.kl is None and line.cells()[-2] == "not measured" and line.kept is not None


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
    (line,) = headline.real_lines(speed, QUALITY, "4096")
    assert line.kept is None and "not measured" in line.cells()
    (line,) = headline.real_lines(SPEED, {}, "4096")
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
    tuned = [line for line in lines if line.settings.startswith(headline.TUNED)]
    assert tuned != [] and all(line.kept is not None and line.kl is not None for line in tuned)
    slower = [line for line in lines if line.full_ms and line.ms > line.full_ms[0]]
    assert slower != [] and all(line.full_ms[1] in line.faster for line in slower)
    shown = README.split("<!-- bench:headline -->")[1].split("<!-- /bench:headline -->")[0]
    assert "x)" not in shown, "a ratio without what it is of reads as a gain"
