"""`python -m bench`: every benchmark is there, explains itself, and says what a run costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as runner

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_list_names_each_with_a_line_and_its_cost():
    done = run()
    assert done.returncode == 0
    for name, (about, cost) in runner.BENCHMARKS.items():
        (line,) = (line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert about in line and cost in line and len(line) <= 100


def test_every_program_of_bench_is_in_the_list():
    """A script that the runner does not know would be one that nobody runs."""
    programs = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in (ROOT / "bench").rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    }
    # The runner itself, and what a measurement starts as a process of its own.
    assert programs - {"bench", "child"} == set(runner.BENCHMARKS)


@pytest.mark.parametrize("name", ["reader", "quality"])  # a module and a package
def test_one_explains_its_arguments(name):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert name in done.stdout and "--" in done.stdout


def test_every_module_of_the_list_is_there():
    for name in runner.BENCHMARKS:
        found = [ROOT / "bench" / f"{name}.py", ROOT / "bench" / name / "__main__.py"]
        assert sum(path.is_file() for path in found) == 1, name


def test_a_name_that_there_is_not_is_refused_with_those_there_are():
    done = run("sidebyside")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("bench: must be one of side_by_side, prefill")
    assert done.stderr.rstrip().endswith("got 'sidebyside'")
