"""`python -m bench weights`: each format is measured beside the first, and how wrong it is."""

from __future__ import annotations

import pytest
import torch

from bench.pages.weights import weight_rows
from bench.weights import FIRST, OTHERS, measured, version_of
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


@pytest.mark.parametrize("name", OTHERS)
def test_another_librarys_layer_computes_the_same_product(name):
    package, make = OTHERS[name]
    if version_of(package) is None:
        pytest.skip(f"{package} is no dependency of the tests")
    weight, given = torch.randn(128, 256).bfloat16() * 0.02, torch.randn(3, 256).bfloat16()
    exact = given.float() @ weight.float().T
    with torch.inference_mode():
        error = (make(weight)(given).float() - exact).norm() / exact.norm()
    assert 0 < error < (0.15 if name.endswith("4") else 0.02)


def test_a_cell_is_the_sum_over_a_layers_shapes():
    row = {FIRST: {"ms_least": 2.0, "error": 0.0}, "int4": {"ms_least": 1.0, "error": 0.08}}
    layers = {name: {"1": row} for name in ("gate", "down", "attention")}
    versions = {"torch": "2"}
    machine = {"cpu": "A", "cores": 2, "file_system": "ext4", "simd": "AVX3", "date": "2026-11-28",
               "versions": versions, "load_average": 1.0}  # fmt: skip
    result = {"machine": machine, "layers": layers, "libraries": {}, "threads": 1}
    *_, ours, few = weight_rows([result])
    assert ours == f"| {FIRST} | 10.00, 1.00 | 0.0% |"
    assert few == "| int4 | 5.00, 0.50 | 8.0% |"
