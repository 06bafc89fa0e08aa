"""How much of a test that could take long runs: all of it in `make test-long`.

C++'s is `tests/cpp/how_long.h`; `tests/python/conftest.py` obeys the marks `long` and `pairs`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def is_long() -> bool:
    return os.environ.get("KVSWAP_TEST_LONG") == "1"


def lives(few: Value, all_of_them: Value) -> Value:
    """Random lives, or what else is tried one after another."""
    return all_of_them if is_long() else few


def covering(rows: Sequence[Mapping[str, Hashable]], once: Collection[str] = ()) -> list[int]:
    """Which rows of a table hold each pair of values that any row holds, in the table's order.

    A row has each parameter's value by its name. A value of a parameter
    named in `once` must be in one of the rows, with no matter what else. The row that has most of
    what is lacking comes next (greedy; at most a few more than the fewest there could be).
    """
    goals = [
        {(name, value) for name, value in row.items()}
        | set(itertools.combinations([(n, row[n]) for n in sorted(row) if n not in once], 2))
        for row in rows
    ]
    lacking = set().union(*goals)
    chosen: list[int] = []
    while lacking:
        best = max(range(len(rows)), key=lambda index: len(goals[index] & lacking))
        chosen.append(best)
        lacking -= goals[best]
    return sorted(chosen)
