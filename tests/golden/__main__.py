"""Golden runs: what a cache decides, reads, writes and charges, as one JSON file.

::

    python -m tests.golden build/golden.json                           # record
    python -m tests.golden build/now.json --against build/golden.json  # record, then compare

Two records of one machine, before and after a change that must not change behaviour, are equal to
the byte: tokens, choices, bytes, counters and ledger of models (`model_runs`) and of layers fed
with whole numbers (`exact_runs`). The latter do not depend on the CPU; `exact.json` keeps them, and
``--keep-exact`` writes it anew where a change is meant.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.golden import exact_runs, model_runs, record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("out", type=Path, help="where to write the record")
    parser.add_argument("--against", type=Path, help="a record to compare with, to the byte")
    parser.add_argument("--keep-exact", action="store_true", help="write tests/golden/exact.json")
    arguments = parser.parse_args()
    exact = exact_runs.run_all()
    runs = model_runs.run_all() | exact
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record.save(runs, arguments.out)
    print(f"{len(runs)} runs -> {arguments.out}")
    if arguments.keep_exact:
        record.save(exact, record.EXACT)
    if arguments.against is None:
        return 0
    found = record.differences(record.load(arguments.against), runs)
    print("\n".join(found) or f"equal to {arguments.against}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
