"""A skip that nobody expects makes the lane red."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import known_skips

ROOT = Path(__file__).parents[2]
LOG = """\
/tests/cpp/io/test_readers.cpp:91: Skipped
DataFile::open: the file system must take O_DIRECT because the mode is direct, but

[  SKIPPED ] Everything/ReaderMatrix.Delivers (0 ms)
/tests/cpp/io/test_fork.cpp:60: Skipped
nobody knows why
"""


def test_reasons_are_found_in_what_ctest_leaves():
    direct, unknown = known_skips.skips_of_ctest(LOG)
    assert known_skips.is_known(direct)
    assert unknown == "nobody knows why" and not known_skips.is_known(unknown)
    assert "known_skips.py" in known_skips.report([unknown])[0]


@pytest.mark.parametrize(
    ("reason", "result"),
    [("make real-model makes the model", 0), ("nobody knows why", 1)],
)
def test_a_lane_with_an_unknown_skip_is_red(reason: str, result: int, tmp_path: Path):
    test = tmp_path / "test_hf_faults.py"
    test.write_text(f"import pytest\n\ndef test():\n    pytest.skip({reason!r})\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(test)]
    environment = os.environ | {"KVSWAP_KNOWN_SKIPS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, f"--rootdir={tmp_path}"],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == result, ended.stdout + ended.stderr
    assert reason in ended.stdout


def test_what_a_machine_has_is_asked_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    """A test that says there is no io_uring where there is one is not believed."""
    known = [(pattern, lambda: False) for pattern, _ in known_skips.KNOWN]
    monkeypatch.setattr(known_skips, "KNOWN", tuple(known))
    assert not known_skips.is_known("io_uring is refused here")
