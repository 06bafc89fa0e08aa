"""README's line about GPUs is what the results of a visit say."""

import copy
from pathlib import Path
from typing import Any

import pytest

from bench.pages import gpu
from bench.table import README


def row(cache: str, ms: float, batch: int = 1) -> dict[str, Any]:
    return {"shape": "8b", "context": 64, "batch": batch, "cache": cache, "ms_median": ms}


RESULT: dict[str, Any] = {
    "device": "A card", "torch": "2.11.0", "date": "2026-11-26",
    "steps": [{"step": "ops", "outcome": "ok"}, {"step": "demo", "outcome": "ok"}],
    "decode": {
        "memory (tmpfs)": {"rows": [
            row("kvswap", 6.0), row("kvswap-k400", 12.0), row("inplace", 3.0),
            row("dynamic", 1.0), row("kvswap", 10.0, 8), row("inplace", 2.0, 8),
            row("kvswap", 1.0, 16),
        ]},
        "local disk": {"rows": [row("kvswap", 30.0)]},
    },
}  # fmt: skip


def test_a_step_is_compared_with_the_cache_in_place_of_the_same_batch() -> None:
    assert gpu.from_in_place(RESULT, "memory (tmpfs)") == [2.0, 4.0, 5.0]
    assert gpu.from_in_place(RESULT, "local disk") == [10.0]
    text = gpu.in_short(RESULT)
    assert "2.0 to 5.0 times with records in memory (tmpfs)" in text
    assert "10.0 to 10.0 times with records on local disk" in text
    assert "all 2 steps of `make gpu-check` that ran passed on A card (2026-11-26)" in text


def test_a_step_that_failed_is_named() -> None:
    failed = copy.deepcopy(RESULT)
    failed["steps"][1]["outcome"] = "failed (1)"
    assert "all but demo of the steps of" in gpu.in_short(failed)


def test_readme_has_what_the_latest_result_says() -> None:
    text = (Path(__file__).resolve().parents[2] / README).read_text(encoding="utf-8")
    assert gpu.readme(text, gpu.latest()) == text, "python -m bench table"


def test_a_page_without_its_line_is_refused() -> None:
    with pytest.raises(SystemExit, match="README.md must have one line of"):
        gpu.readme("nothing", RESULT)
