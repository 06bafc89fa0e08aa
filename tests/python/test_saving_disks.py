"""Saved caches on real disks: read-only, full, with other sectors. Mounting needs root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.python.ready_python import NOT_MOUNTED, Running
from tests.python.tiny_models import has_native

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
MOUNTS = {
    "read_only": "mount -t tmpfs -o size=24m none disk",
    "full": "mount -t tmpfs -o size=24m none disk",
    "sectors": "truncate -s 24M image && loop=$(losetup -f --show -b 4096 image) && "
    "mkfs.ext4 -q -O ^has_journal $loop && mount $loop disk && losetup -d $loop",
}


@pytest.mark.parametrize("case", MOUNTS)
def test_a_disk_that_is_not_as_others(case: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk, other = tmp_path / "disk", tmp_path / "other"
    disk.mkdir()
    other.mkdir()
    worker = ("-m", "tests.python.saved_disk", case, disk, other)
    ended = Running(*worker, mount=MOUNTS[case], folder=tmp_path).wait(600)
    if ended.returncode == NOT_MOUNTED:
        kind = "4,096-byte sectors" if case == "sectors" else "tmpfs"
        pytest.skip(f"{kind} cannot be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
