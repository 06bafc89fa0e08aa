"""Runs tests on each torch and each transformers that is promised: ``make version-matrix``.

    python -m tests.packaging.version_matrix [--torch 2.15.0 ...] [--transformers 5.24.0 ...]

For each torch it asks whether the libraries in this tree load with it. If they do, they are what is
tested; else libraries are built for that torch, into a copy of the tree. Then it runs the tests of
``make other-transformers`` on each transformers. Each pair's result is written at once, as JSON,
into tests/packaging/versions; a pair that passed is not run again without --again. At the end the
table of docs/versions.md is written from all results that are there.

With --libtorch it builds libraries and examples/libtorch for each torch instead, as a C++ program
must be, and runs that program's tests.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.packaging import other_transformers
from tests.packaging.version_places import (
    OWN_PYTHON,
    ROOT,
    WORK,
    CannotRunError,
    Environment,
    build_example,
    built_tree,
    fit_of_present_libraries,
    interpreter,
    own_torch,
    paths,
    remove_torch,
    torch_folder,
)

TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TRANSFORMERS = (other_transformers.oldest(), "5.19.0", "5.23.0", other_transformers.NEWEST)
RESULTS = ROOT / "tests" / "packaging" / "versions"
PAGE = ROOT / "docs" / "versions.md"
MARKS = re.compile(r"(<!-- version-matrix -->\n).*?(<!-- /version-matrix -->)", re.DOTALL)
# A torch with its CUDA libraries, and how long a cell and a build take here.
FETCHED_GB, DISK_GB = 2.6, 4.4
CELL_SECONDS, BUILD_MINUTES = 40, 15
# What a cell ran on, asked of the processes' own modules and of the files that are mapped.
LIBTORCH_TESTS = "tests/python/test_libtorch_example.py"
USED = """
import json, platform
import torch, transformers, kvswap_torch
from kvswap_torch import _C, native
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libtorch_cpu.so" in line}
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__,
                  "transformers": transformers.__version__, "mapped": sorted(mapped),
                  "torch_folder": torch.__path__[0], "package": kvswap_torch.__path__[0],
                  "libraries": native.build_info()["torch"]}))
"""


@dataclass(frozen=True)
class Cell:
    """One pair of releases, on one Python."""

    python: str
    torch: str
    transformers: str

    @property
    def file(self) -> Path:
        name = f"python-{self.python}_torch-{self.torch}_transformers-{self.transformers}.json"
        return RESULTS / name

    def has_passed(self) -> bool:
        return self.file.is_file() and not json.loads(self.file.read_text())["failed"]


def system() -> str:
    name = platform.freedesktop_os_release()
    return f"{name['NAME'].split()[0]} {name.get('VERSION_ID', '')}, {platform.machine()}"


def check_used(cell: Cell, used: dict[str, Any], tree: Path) -> None:
    """That the tests would run on what the cell names, and on nothing else."""
    wanted = {
        "python": used["python"].startswith(f"{cell.python}."),
        "torch": used["torch"].split("+")[0] == cell.torch,
        "transformers": used["transformers"] == cell.transformers,
        "mapped": used["mapped"] == [f"{used['torch_folder']}/lib/libtorch_cpu.so"],
        "package": used["package"] == str(tree / "kvswap_torch"),
    }
    if wrong := {name: used[name] for name, right in wanted.items() if not right}:
        raise CannotRunError(f"{cell}: something else would be tested: {wrong}")


def tally(report: Path) -> tuple[int, int, list[str]]:
    """Passed, skipped, and names of those that failed, of pytest's own report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case.get("name", "") for case in cases
              if case.find("failure") is not None or case.find("error") is not None]  # fmt: skip
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - skipped - len(failed), skipped, failed


def run_cell(cell: Cell, torch: Path, tree: Path, fit: dict[str, Any]) -> dict[str, Any]:
    """One pair's result."""
    folder, why = other_transformers.fetch(cell.transformers)
    if why:
        raise CannotRunError(f"transformers {cell.transformers} is not to be had: {why}")
    environment = Environment(interpreter(cell.python), paths(torch, folder), tree)
    used = environment.ask(USED)
    check_used(cell, used, tree)
    told = run_tests(environment, other_transformers.TESTS, str(cell))
    return {
        "python": used["python"], "torch": used["torch"], "transformers": used["transformers"],
        "libraries_built_for": used["libraries"], "built_for_this_torch": tree != ROOT,
        "present_libraries": fit,
    } | told  # fmt: skip


def run_tests(environment: Environment, tests: str, what: str) -> dict[str, Any]:
    """Counts, names of failures and seconds of one file of tests.

    Raises
    ------
    CannotRunError
        pytest itself failed, or found no test.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", tests)
        done = environment.run(*command)
        if not report.is_file():
            raise CannotRunError(f"{what}: pytest ended with {done.returncode}\n{done.stderr}")
        passed, skipped, failed = tally(report)
    if not failed and (done.returncode or not passed):
        raise CannotRunError(f"{what}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    if failed:
        print(done.stdout[-6000:], flush=True)
    return {
        "passed": passed, "skipped": skipped, "failed": failed,
        "seconds": round(time.monotonic() - began), "date": datetime.date.today().isoformat(),
        "version": importlib.metadata.version("kvswap_torch"), "system": system(),
    }  # fmt: skip


def run_libtorch(release: str, jobs: int) -> int:
    """The C++ example, built for one torch against what a wheel installs; whether it failed."""
    tree, torch = built_tree(release, OWN_PYTHON, jobs), torch_folder(release, OWN_PYTHON)
    build_example(tree, torch)
    (folder, why) = other_transformers.fetch(pinned_transformers())
    if why:
        raise CannotRunError(f"transformers {pinned_transformers()} is not to be had: {why}")
    environment = Environment(sys.executable, paths(torch, folder), tree)
    used = environment.ask(USED)
    check_used(Cell(OWN_PYTHON, release, pinned_transformers()), used, tree)
    told = run_tests(environment, LIBTORCH_TESTS, f"libtorch {release}")
    result = {
        "python": used["python"], "torch": used["torch"], "libraries_built_for": used["libraries"],
    } | told  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    libtorch_file(release).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        f"version-matrix: libtorch {release}: {verdict(result)}; {result['seconds']} s", flush=True
    )
    return int(bool(result["failed"]))


def libtorch_file(release: str) -> Path:
    return RESULTS / f"libtorch-{release}.json"


def pinned_transformers() -> str:
    (found,) = re.findall(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    return found


def run_row(cells: list[Cell], jobs: int) -> int:
    """All cells of one torch; how many of them failed."""
    python, release = cells[0].python, cells[0].torch
    torch = torch_folder(release, python)
    own = python == OWN_PYTHON
    fit = fit_of_present_libraries(torch) if own else {"refused": f"no module for Python {python}"}
    tree = ROOT if own and not fit["refused"] else None
    told = "the libraries in this tree load" if tree else f"libraries are built: {fit['refused']}"
    print(f"version-matrix: torch {release}: {told}", flush=True)
    tree = tree or built_tree(release, python, jobs)
    failed = 0
    for cell in cells:
        result = run_cell(cell, torch, tree, fit)
        RESULTS.mkdir(exist_ok=True)
        cell.file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(
            f"version-matrix: torch {release}, transformers {cell.transformers}, Python {python}: "
            f"{result['passed']} passed, {result['skipped']} skipped, failed: "
            f"{', '.join(result['failed']) or 'none'}; {result['seconds']} s",
            flush=True,
        )
        failed += bool(result["failed"])
    return failed


def results() -> list[dict[str, Any]]:
    """All that are there, oldest releases first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("python-*.json")]
    return sorted(found, key=lambda each: [number(each[name]) for name in
                                           ("python", "torch", "transformers")])  # fmt: skip


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("+")[0].split(".")))


def table(found: Iterable[dict[str, Any]]) -> str:
    """A row for each torch, a column for each transformers."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for each in found:
        rows.setdefault((each["torch"], each["python"]), {})[each["transformers"]] = each
    names = sorted({name for row in rows.values() for name in row}, key=number)
    lines = [
        "| torch | Python | libraries built for | " + " | ".join(names) + " | LibTorch | when |",
        "|---|---|---|" + "---|" * (len(names) + 2),
    ]
    for (torch, python), row in rows.items():
        built = sorted({each["libraries_built_for"] for each in row.values()})
        dates = sorted({each["date"] for each in row.values()})
        cells = [verdict(row[name]) if name in row else "" for name in names]
        cells.append(libtorch_verdict(torch, python))
        shown = [torch, python, ", ".join(built), *cells, " to ".join(dates[:1] + dates[1:][-1:])]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def libtorch_verdict(torch: str, python: str) -> str:
    """That of the C++ example, in the row of the Python that its libraries were built with."""
    file = libtorch_file(torch.split("+")[0])
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return verdict(found) if found.get("python") == python else ""


def verdict(result: dict[str, Any]) -> str:
    total = result["passed"] + len(result["failed"])
    skipped = f", {result['skipped']} skipped" if result["skipped"] else ""
    return f"{result['passed']} of {total} pass{skipped}"


def with_table(page: str) -> str:
    """The page with the table of what results there are between its marks."""
    if len(MARKS.findall(page)) != 1:
        raise SystemExit(
            f"version-matrix: {PAGE} must have <!-- version-matrix --> and its end once"
        )
    return MARKS.sub(lambda found: f"{found[1]}{table(results())}\n{found[2]}", page)


def plan(cells: list[Cell], keep: bool) -> str:
    """What it will cost, as far as it can be known before."""
    rows = {(cell.python, cell.torch) for cell in cells}
    fetched = [row for row in rows if row != (OWN_PYTHON, own_torch())]
    # Older torches are always built for; so are other Pythons. A newer one may need it too.
    built = [row for row in rows if row[0] != OWN_PYTHON or number(row[1]) < number(own_torch())]
    held = DISK_GB * (len(fetched) if keep else min(1, len(fetched)))
    return (
        f"version-matrix: {len(cells)} pairs to run, some {CELL_SECONDS} s each; "
        f"{len(fetched)} torches to fetch, {FETCHED_GB} GB each; {len(built)} builds, some "
        f"{BUILD_MINUTES} minutes each on two cores; {held:.0f} GB on disk at once"
    )


def libtorch_plan(releases: Iterable[str]) -> str:
    count = len(list(releases))
    return (
        f"version-matrix: {count} builds of libraries and of examples/libtorch, some "
        f"{BUILD_MINUTES} minutes each on two cores; at most {FETCHED_GB} GB to fetch for each"
    )


def wanted_cells(asked: argparse.Namespace) -> list[Cell]:
    cells = [Cell(asked.python, torch, transformers)
             for torch in asked.torch for transformers in asked.transformers]  # fmt: skip
    return [cell for cell in cells if asked.again or not cell.has_passed()]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="version_matrix", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="RELEASE")
    parser.add_argument("--transformers", nargs="+", default=TRANSFORMERS, metavar="RELEASE")
    parser.add_argument("--python", default=OWN_PYTHON, metavar="3.12", help="default: this one")
    parser.add_argument("--again", action="store_true", help="also pairs that have passed")
    parser.add_argument("--keep", action="store_true", help="keep each torch after its row")
    parser.add_argument("--plan", action="store_true", help="say what it would cost, and end")
    parser.add_argument("--libtorch", action="store_true", help="the C++ example on each --torch")
    parser.add_argument("--table", action="store_true", help="write the page's table, and end")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.table:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    cells = wanted_cells(asked)
    print(libtorch_plan(asked.torch) if asked.libtorch else plan(cells, asked.keep), flush=True)
    if asked.plan:
        return 0
    wrong = 0
    for release in asked.torch if asked.libtorch else dict.fromkeys(cell.torch for cell in cells):
        WORK.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(WORK).free / 1e9) < DISK_GB + 2:
            sys.exit(f"version-matrix: needs {DISK_GB + 2:.0f} GB of free disk, has {free:.1f}")
        try:
            if asked.libtorch:
                wrong += run_libtorch(release, asked.jobs)
            else:
                wrong += run_row([cell for cell in cells if cell.torch == release], asked.jobs)
        except CannotRunError as why:
            print(f"version-matrix: torch {release}: {why}", flush=True)
            wrong += 1
        if not asked.keep:
            remove_torch(release, asked.python)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
