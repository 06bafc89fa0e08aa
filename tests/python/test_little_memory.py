"""A memory cgroup that holds a third of what the cache has on disk, page cache and all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.side_by_side.memory_cap import NONE, MemoryCap
from tests import known_skips
from tests.python import ready_python
from tests.python.tiny_models import has_native

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

LIMIT = 60 << 20


@pytest.fixture
def cap() -> Iterator[MemoryCap]:
    cap = MemoryCap.open()
    if cap is None:
        pytest.skip(NONE)
    cap.limit(LIMIT)
    yield cap
    cap.close()


def told(folder: Path, cgroup: object, io_mode: str, reader: str) -> dict:
    return json.loads(
        ready_python.run("-m", "tests.python.little_memory", folder, cgroup, io_mode, reader)
    )


@pytest.fixture(scope="module")
def without_a_limit(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return told(tmp_path_factory.mktemp("free"), "none", "direct", "sync")


@pytest.mark.parametrize(("io_mode", "reader"), [("direct", "auto"), ("buffered", "threads")])
def test_a_text_thrice_the_limit(
    io_mode: str, reader: str, cap: MemoryCap, without_a_limit: dict, tmp_path: Path
) -> None:
    if known_skips.lacks_disk():
        pytest.skip("the folder of the tests lies in memory, which a limit on memory counts")
    limited = told(tmp_path, cap.folder, io_mode, reader)
    assert limited["digest"] == without_a_limit["digest"]
    assert cap.folder.name in limited["cgroups"]
    assert cap.folder.name not in without_a_limit["cgroups"]
    assert limited["bytes_on_disk"] > 3 * LIMIT
    assert limited["bytes_read"] > 0
