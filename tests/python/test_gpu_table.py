"""docs/gpu.md's tables and README's line are what the results on a GPU say."""

import copy
from typing import Any

import pytest

from bench import gpu_table


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
    assert gpu_table.from_in_place(RESULT, "memory (tmpfs)") == [2.0, 4.0, 5.0]
    assert gpu_table.from_in_place(RESULT, "local disk") == [10.0]
    text = gpu_table.in_short(RESULT)
    assert "2.0 to 5.0 times with records in memory (tmpfs)" in text
    assert "10.0 to 10.0 times with records on local disk" in text
    assert "all 2 steps of `make gpu-check` that ran passed on A card (2026-11-26)" in text


def test_a_step_that_failed_is_named() -> None:
    failed = copy.deepcopy(RESULT)
    failed["steps"][1]["outcome"] = "failed (1)"
    assert "all but demo of the steps of" in gpu_table.in_short(failed)


def test_the_pages_have_what_the_latest_result_says() -> None:
    result = gpu_table.latest()
    for path, make in ((gpu_table.PAGE, gpu_table.written), (gpu_table.README, gpu_table.readme)):
        text = path.read_text(encoding="utf-8")
        assert make(text, result) == text, f"{path.name}: python -m bench.gpu_table"


def test_a_page_without_its_line_is_refused() -> None:
    with pytest.raises(SystemExit, match="README.md must have one line of"):
        gpu_table.readme("nothing", RESULT)
