"""The part of a table of parameters that `make test` runs has every pair of values."""

from __future__ import annotations

import itertools

import pytest

from tests.how_long import covering

pytest_plugins = ["pytester"]

SIZES = {"seed": 8, "rows": 5, "heads": 2, "device": 3}
TABLE = [
    dict(zip(SIZES, values, strict=True))
    for values in itertools.product(*(range(size) for size in SIZES.values()))
]


def values_of(rows: list[dict[str, int]], *names: str) -> set[tuple[int, ...]]:
    return {tuple(row[name] for name in names) for row in rows}


def test_every_pair_that_a_full_table_has() -> None:
    chosen = [TABLE[index] for index in covering(TABLE)]
    for names in itertools.combinations(SIZES, 2):
        assert values_of(chosen, *names) == values_of(TABLE, *names)
    assert 40 <= len(chosen) <= 48


def test_parameters_that_come_once_make_no_rows_beyond_the_pairs_of_the_others() -> None:
    chosen = [TABLE[index] for index in covering(TABLE, once=["seed"])]
    for names in itertools.combinations(["rows", "heads", "device"], 2):
        assert values_of(chosen, *names) == values_of(TABLE, *names)
    assert values_of(chosen, "seed") == values_of(TABLE, "seed")
    assert 15 <= len(chosen) <= 20
    assert len(covering(TABLE, once=list(SIZES))) == 8


def test_pairs_that_no_row_has_are_not_asked_for() -> None:
    rows = [row for row in TABLE if (row["rows"], row["heads"]) != (4, 1)]
    chosen = [rows[index] for index in covering(rows)]
    assert values_of(chosen, "rows", "heads") == values_of(rows, "rows", "heads")
    assert covering([{}]) == [] and covering([]) == []


def test_what_make_test_leaves_out_make_test_long_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.long
        def test_slow():
            pass

        @pytest.mark.pairs(once=["seed"])
        @pytest.mark.parametrize("seed", range(3))
        @pytest.mark.parametrize("rows", range(4))
        def test_table(seed, rows):
            pass

        def test_plain():
            pass
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n    long: x\n    pairs(once): x\n")
    for is_long, outcomes in (("", {"passed": 5, "deselected": 9}), ("1", {"passed": 14})):
        monkeypatch.setenv("KVSWAP_TEST_LONG", is_long)
        pytester.runpytest("-p", "tests.python.conftest").assert_outcomes(**outcomes)
