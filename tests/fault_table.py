"""Writes what `make faults` saw into docs/faults.md, between its marks.

python -m tests.fault_table build/fault_table docs/faults.md
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

BEGIN, END = "<!-- make faults -->", "<!-- end -->"
PHASES = ("prefill", "decode", "crop", "reset", "close", "turn", "clusters")
ABSENT = "absent"  # no such phase there: turns and clusters are the host's alone


def rows(text: str) -> list[list[str]]:
    """Class, reader and mode and place, and a cell a phase; by class in the order of the run."""
    return [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line]


def table(cells: list[list[str]]) -> str:
    """Markdown: a row a class, since its columns mostly agree; where they differ, all of them."""
    lines = ["| fault | where | " + " | ".join(PHASES) + " |", "|---" * (2 + len(PHASES)) + "|"]
    classes = list(dict.fromkeys(row[0] for row in cells))
    for name in classes:
        groups: list[tuple[list[str], list[str]]] = []
        for row in cells:
            if row[0] == name:
                add_row(groups, row[2:], row[1])
        for answers, places in groups:
            where = "everywhere" if len(groups) == 1 else "; ".join(sorted(places))
            lines.append(f"| {name} | {where} | " + " | ".join(answers) + " |")
    return "\n".join(lines)


def add_row(groups: list[tuple[list[str], list[str]]], answers: list[str], place: str) -> None:
    """Beside those of the same answers, as far as there are some."""
    for known, places in groups:
        if all(a == b or ABSENT in (a, b) for a, b in zip(known, answers, strict=True)):
            known[:] = [b if a == ABSENT else a for a, b in zip(known, answers, strict=True)]
            places.append(place)
            return
    groups.append((list(answers), [place]))


def empty_cells(cells: list[list[str]]) -> list[str]:
    """Where a class struck nothing."""
    return [
        f"{row[0]}, {row[1]}, {phase}"
        for row in cells
        for phase, cell in zip(PHASES, row[2:], strict=True)
        if cell == "-"
    ]


def cpu_model() -> str:
    """As the kernel names it; the architecture where it does not."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> int:
    cells = rows(Path(sys.argv[1]).read_text())
    page = Path(sys.argv[2])
    missing = empty_cells(cells)
    if not cells or missing:
        print("faults: cells that are empty:", *(missing or ["all"]), sep="\n  ", file=sys.stderr)
        return 1
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    machine = f"{cpu_model()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    shown = (
        f"{BEGIN}\nAt {commit}, {machine}, {len(cells)} rows of the run.\n\n{table(cells)}\n{END}"
    )
    page.write_text(before + shown + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
