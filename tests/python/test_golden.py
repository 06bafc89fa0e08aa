"""Golden runs: what does not depend on the CPU is what it was, and the comparison can fail."""

from __future__ import annotations

import copy

from tests.golden import exact_runs, model_runs, record


def test_choices_bytes_counters_and_ledger_are_what_they_were():
    """Where a change is meant: ``make golden ARGS=--keep-exact``, and say why in the commit."""
    assert record.differences(record.load(record.EXACT), exact_runs.run_all()) == []


def test_every_number_is_compared(tmp_path):
    runs = {"one": {"tokens": [[1, 2], [3]], "ledger": {"pages": 5, "total": 7}}, "two": {}}
    record.save(runs, tmp_path / "runs.json")
    kept = record.load(tmp_path / "runs.json")
    assert kept == runs and record.differences(kept, runs) == []
    changed = copy.deepcopy(runs)
    changed["one"]["tokens"][0][1] = 9
    changed["one"]["ledger"]["pages"] = 6
    del changed["one"]["ledger"]["total"], changed["two"]
    assert record.differences(kept, changed) == [
        "one: ledger.pages: 5 -> 6",
        "one: ledger.total: 7 -> null",
        "one: tokens[0][1]: 2 -> 9",
        "two: only in the expected record",
    ]


def test_runs_have_names_of_their_own():
    names = [case.name for case in model_runs.cases()]
    assert len(set(names)) == len(names) >= 24
