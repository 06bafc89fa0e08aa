"""The types of the C++ extension that are checked in are those of the built one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.python.tiny_models import has_native

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "kvswap_torch" / "_C.pyi"


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_the_stub_is_what_make_stubs_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pybind11_stubgen", "kvswap_torch._C", "-o", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = tmp_path / "kvswap_torch" / "_C.pyi"
    assert written.read_text() == STUB.read_text(), "run make stubs"


def test_the_stub_is_python() -> None:
    compile(STUB.read_text(), str(STUB), "exec")
