"""The matrix of torch and transformers: what it runs, what it writes, and what the page shows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.packaging import version_matrix as matrix
from tests.packaging.version_places import CannotRunError, paths

ROOT = Path(__file__).resolve().parents[2]
ASKED = argparse.Namespace(
    python="3.11", torch=["2.14.1"], transformers=["5.17.0", "5.24.0"], again=False
)


def result(**other: Any) -> dict[str, Any]:
    return {
        "python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.17.0",
        "libraries_built_for": "2.13.0+cpu", "passed": 26, "skipped": 0, "failed": [],
        "seconds": 30, "date": "2026-11-27",
    } | other  # fmt: skip


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path)
    return tmp_path


def test_the_page_shows_the_results_that_are_there() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.with_table(page) == page


def test_every_promised_pair_was_run_and_passed() -> None:
    python = "3.11"
    for torch in matrix.TORCHES:
        for transformers in matrix.TRANSFORMERS:
            cell = matrix.Cell(python, torch, transformers)
            assert cell.has_passed(), f"{cell}: run: make version-matrix"
            told = json.loads(cell.file.read_text())
            assert told["passed"] > 20 and told["skipped"] == 0
            assert told["torch"].split("+")[0] == torch and told["transformers"] == transformers


def test_what_gpu_machines_have_was_run_and_passed() -> None:
    """A Debian or Ubuntu image with CUDA 13: another Python than this one, the oldest releases."""
    cell = matrix.Cell("3.12", matrix.TORCHES[0], matrix.TRANSFORMERS[0])
    assert cell.has_passed(), f"{cell}: run: make version-matrix with --python 3.12"
    told = json.loads(cell.file.read_text())
    assert told["passed"] > 20 and told["python"].startswith("3.12.")
    assert told["built_for_this_torch"] and told["libraries_built_for"] == told["torch"]


@pytest.mark.parametrize("torch", [matrix.TORCHES[0], matrix.TORCHES[-1]])
def test_a_libtorch_program_was_run_on_the_oldest_and_the_newest(torch: str) -> None:
    told = json.loads(matrix.libtorch_file(torch).read_text())
    assert told["passed"] and not told["failed"] and not told["skipped"]
    assert told["torch"].split("+")[0] == torch and told["libraries_built_for"] == told["torch"]


def test_a_table_has_releases_in_their_order_and_tells_what_failed(folder: Path) -> None:
    for number, each in enumerate([
        result(torch="2.11.0", transformers="5.9.0", date="2026-11-29"),
        result(torch="2.9.0", failed=["test_one"], passed=25, skipped=1),
        result(torch="2.11.0"),
        result(torch="2.11.0", python="3.12.1"),
    ]):  # fmt: skip
        (folder / f"python-{number}.json").write_text(json.dumps(each))
    (folder / "libtorch-2.11.0.json").write_text(json.dumps(result(passed=5)))
    assert matrix.table(matrix.results()).splitlines() == [
        "| torch | Python | libraries built for | 5.9.0 | 5.17.0 | LibTorch | when |",
        "|---|---|---|---|---|---|---|",
        "| 2.9.0 | 3.11.7 | 2.13.0+cpu |  | 25 of 26 pass, 1 skipped |  | 2026-11-27 |",
        "| 2.11.0 | 3.11.7 | 2.13.0+cpu | 26 of 26 pass | 26 of 26 pass "
        "| 5 of 5 pass | 2026-11-27 to 2026-11-29 |",
        "| 2.11.0 | 3.12.1 | 2.13.0+cpu |  | 26 of 26 pass |  | 2026-11-27 |",
    ]


def test_pairs_that_passed_are_not_run_again_unless_asked(folder: Path) -> None:
    first, second = matrix.wanted_cells(ASKED)
    first.file.write_text(json.dumps(result()))
    second.file.write_text(json.dumps(result(failed=["test_one"])))
    assert matrix.wanted_cells(ASKED) == [second]
    asked = argparse.Namespace(**vars(ASKED) | {"again": True})
    assert matrix.wanted_cells(asked) == [first, second]


def used(**other: Any) -> dict[str, Any]:
    return {
        "python": "3.11.7", "torch": "2.14.1+cu130", "transformers": "5.17.0",
        "mapped": ["/there/torch/lib/libtorch_cpu.so"], "torch_folder": "/there/torch",
        "package": "/tree/kvswap_torch",
    } | other  # fmt: skip


def test_a_pair_that_is_not_what_would_be_tested_is_refused() -> None:
    cell = matrix.Cell("3.11", "2.14.1", "5.17.0")
    matrix.check_used(cell, used(), Path("/tree"))
    for wrong in (
        {"python": "3.12.1"},
        {"torch": "2.13.0+cpu"},
        {"transformers": "5.23.0"},
        {"mapped": ["/here/torch/lib/libtorch_cpu.so", "/there/torch/lib/libtorch_cpu.so"]},
        {"package": "/elsewhere/kvswap_torch"},
    ):
        with pytest.raises(CannotRunError, match=next(iter(wrong))):
            matrix.check_used(cell, used(**wrong), Path("/tree"))


def test_failures_are_counted_from_pytest_s_own_report(tmp_path: Path) -> None:
    test = tmp_path / "test_some.py"
    test.write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.skip\ndef test_left_out(): pass\n"
    )
    report = tmp_path / "report.xml"
    alone = ["-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    ended = pytest.main([*alone, f"--junitxml={report}", str(test)])
    assert ended == pytest.ExitCode.TESTS_FAILED
    assert matrix.tally(report) == (1, 1, ["test_wrong", "test_error"])


def test_libraries_that_do_not_load_are_built_for_that_torch(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    trees: dict[str, Path] = {}

    def run_cell(cell: matrix.Cell, torch: Path, tree: Path, fit: dict[str, Any]) -> dict[str, Any]:
        trees[cell.torch] = tree
        return result(failed=["test_one"] if cell.torch == "2.11.0" else [])

    refused = {Path("2.11.0"): "six are missing", Path("2.15.0"): ""}
    monkeypatch.setattr(matrix, "torch_folder", lambda release, _: Path(release))
    monkeypatch.setattr(
        matrix, "fit_of_present_libraries", lambda torch: {"refused": refused[torch]}
    )
    monkeypatch.setattr(matrix, "built_tree", lambda release, *_: Path("built") / release)
    monkeypatch.setattr(matrix, "run_cell", run_cell)
    wrong = [matrix.run_row([matrix.Cell("3.11", torch, "5.17.0")], 1)
             for torch in ("2.11.0", "2.15.0")]  # fmt: skip
    assert wrong == [1, 0] and trees == {"2.11.0": Path("built/2.11.0"), "2.15.0": ROOT}
    # There is no module for another Python in this tree.
    matrix.run_row([matrix.Cell("3.99", "2.15.0", "5.17.0")], 1)
    assert trees["2.15.0"] == Path("built/2.15.0")


def test_this_environment_s_own_torch_needs_no_folder_before_it() -> None:
    from tests.packaging.version_places import own_packages

    assert paths(own_packages(), Path("/one")) == (Path("/one"),)
    assert paths(Path("/torch"), Path("/one")) == (Path("/one"), Path("/torch"))
