"""A test that ends by a fatal signal says where, in the frames below Python's too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("workers", [[], ["-n2", "--dist=loadfile", "--max-worker-restart=0"]])
def test_a_fatal_signal_shows_native_frames(workers, tmp_path):
    if not (ROOT / "build/dev/tests/cpp/libnative_stack.so").exists():
        pytest.skip("kvswap_torch._C is not built")
    (tmp_path / "test_it.py").write_text(
        "import ctypes, threading\n"
        "def test_it():\n"
        "    crash = threading.Thread(target=lambda: ctypes.string_at(0))\n"
        "    crash.start(); crash.join()\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path]
    ended = subprocess.run(
        [*command, *workers, "-p", "tests.conftest", tmp_path / "test_it.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert ended.returncode != 0
    assert "native stack: signal 11" in ended.stderr + ended.stdout
    assert "libffi" in ended.stderr + ended.stdout
