"""The libraries are built hardened: what `readelf` says of them, and of the build's own flags."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvswap_torch import native

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(native.PACKAGE_DIR.glob("_C*.so"))
LIBRARIES = [native.LIBRARY, *MODULES]
COMPILER = (ROOT / "cmake" / "KvswapCompiler.cmake").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.skipif(not MODULES, reason="kvswap_torch._C is not built"),
    pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf"),
]


def readelf(*words: str) -> str:
    return subprocess.run(
        ["readelf", "--wide", *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])
def test_addresses_are_resolved_at_once_and_then_read_only(library: Path) -> None:
    """Nothing is left in memory that a stray write could turn into a jump; no stack is run."""
    segments = readelf("--program-headers", str(library))
    assert "GNU_RELRO" in segments
    assert re.search(r"GNU_STACK .* RW +0x", segments) and not re.search(r" RWE ", segments)
    dynamic = readelf("--dynamic", str(library))
    assert re.search(r"\(FLAGS_1\).*\bNOW\b", dynamic) or "BIND_NOW" in dynamic
    assert "TEXTREL" not in dynamic


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])
def test_stacks_have_a_guard(library: Path) -> None:
    assert "__stack_chk_fail" in readelf("--dyn-syms", str(library))


def test_buffers_whose_size_is_known_are_checked() -> None:
    """Calls that the compiler can prove right need no check, so that a few are enough."""
    checked = re.findall(r"__\w+_chk\b", readelf("--dyn-syms", str(native.LIBRARY)))
    assert set(checked) - {"__stack_chk_fail"} != set()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="-fcf-protection is of x86")
def test_jumps_lead_to_marked_places() -> None:
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(MODULES[0])],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert code.count("endbr64") > 100


def test_the_flags_are_those_of_every_build_that_is_not_instrumented() -> None:
    for flag in ("-fstack-protector-strong", "-fcf-protection", "-D_FORTIFY_SOURCE=${fortify}"):
        assert flag in COMPILER
    assert "LINKER:-z,relro LINKER:-z,now" in COMPILER
