"""`python -m bench weights`: each format is measured beside the first, and how wrong it is."""

from __future__ import annotations

import pytest
import torch

from bench.weights import FIRST, measured
from kvswap_torch.few_bits import INT4_LEVELS


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in INT4_LEVELS,
    reason="the processor has neither AVX2 nor AVX-512",
)
def test_formats_are_compared_by_turns():
    told = measured(64, 96, 3, 2)
    assert {"torch bf16", FIRST, "int8", "int4"} <= told.keys()
    assert told[FIRST]["ratio_of_pairs"] == 1.0
    assert all(0 < row["ms_least"] <= row["ms"] for row in told.values())
    errors = [told[name]["error"] for name in (FIRST, "int8", "int4")]
    assert errors == sorted(errors) and errors[0] < 0.005 and 0.03 < errors[2] < 0.15
