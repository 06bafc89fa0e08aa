"""Saved caches on real disks: read-only, full, with other sectors. Mounting needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python.saved_child import ROOT
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
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and unshare")
    disk, other = tmp_path / "disk", tmp_path / "other"
    disk.mkdir()
    other.mkdir()
    script = (
        f'cd "$1" && {MOUNTS[case]} || exit 77; cd "$2"; shift 2; "$@"; e=$?; umount "$0"; exit $e'
    )
    worker = [sys.executable, "-m", "tests.python.saved_disk", case, str(disk), str(other)]
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(disk), str(tmp_path), str(ROOT), *worker],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if ended.returncode == 77:
        kind = "4,096-byte sectors" if case == "sectors" else "tmpfs"
        pytest.skip(f"{kind} cannot be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
