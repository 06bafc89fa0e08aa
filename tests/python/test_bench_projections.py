"""Whose queries a projection is made for, and the tables of what it finds."""

from __future__ import annotations

import pytest

from bench.projections import PROMPT, cells_of, fitted, lines, measure, projection_rows
from bench.rank_settings import predictions, ranked_rows
from bench.reading import REFERENCE, open_reading
from bench.sweep_table import row_bytes, sweep_rows
from kvswap_torch.tuning import moments


def test_every_projection_is_measured_alike(monkeypatch):
    monkeypatch.setattr("bench.projections.COLUMNS", (4, 32))
    monkeypatch.setattr("bench.projections.GROUPS", (2, 30))
    calibrator, samples = open_reading(REFERENCE, 600, 2)
    weight = moments.LOOK_UPS_WEIGHT
    pairs = fitted(calibrator, samples[1:])
    assert weight == moments.LOOK_UPS_WEIGHT
    measured = lines(measure(calibrator, samples[:1], pairs))
    assert {line["projection"] for line in measured} == {PROMPT, *pairs}
    assert len(measured) == 4 * 2 * 2
    by_place = {(row["projection"], row["groups"], row["columns"]): row for row in measured}
    for name in (PROMPT, *pairs):
        few, many = by_place[name, 2, 4], by_place[name, 30, 32]
        assert 0 <= few["found"] < many["found"] <= 1
        assert 0 < few["held"] < many["held"] <= 1
    head, rule, *rows = projection_rows([{"lines": measured}])
    assert cells_of(head) == ["groups, columns", PROMPT, *pairs]
    assert rule == "|---|---|---|---|---|"
    assert [cells_of(row)[0] for row in rows] == ["2, 4", "2, 32", "30, 4", "30, 32"]


def test_predictions_are_told_by_name():
    told = predictions({"held": 0.5, "found": 0.4, "found_by_step": 0.25})
    assert told["what the tuner takes (`worth`)"] == pytest.approx(0.2 * 0.5 + 0.8 * 0.25)
    rows = list(ranked_rows([{"model": "m", "settings": [{}] * 3, "correlations": {"a": 0.5}}]))
    assert rows[-1] == "| m, 3 | a | 0.50 |"


def test_a_sweep_tells_bytes_as_a_share_of_a_tokens_keys_and_values():
    told = {"kl": [0.1], "agree": [0.9], "kept": [0.5, 0.4, 0.6]}
    method = {"ranks": [16, 16], "tokens_per_step": 128.0}
    method |= {"tasks": {"asked": told, "language": told}}
    methods = {"full": {"documents": 2}, "kvswap:rank=16,groups=100,dtype=int4": method}
    methods |= {"kvswap:rank=16,groups=32,dtype=int4": method | {"tokens_per_step": 32.0}}
    part = {"full_bytes": 2 * 768 * 100, "tokens": 100, "methods": methods}
    rows = list(sweep_rows([{"model": "m", "lengths": {"100": part}}]))
    assert row_bytes(16, "int4") == 12 and row_bytes(16, "int8") == 20
    assert [row.split(" | ")[3] for row in rows[2:]] == ["32", "128"]
    assert "| 16 in int4 | 1/64 | 128 | 0.50 (0.40 to 0.60) | 0.100 | 0.900 |" in rows[-1]
