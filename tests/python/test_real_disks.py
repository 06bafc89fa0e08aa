"""Real file systems that fill up: one clear error, room made, the same pass again, the same tokens.

Each is mounted from a small image in a name space of its own, which needs root. Where that cannot
be had the test is skipped; KVSWAP_TEST_ALL_DISKS=1 makes a skip an error.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.python.ready_python import NOT_MOUNTED, Running
from tests.python.tiny_models import has_native

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

IMAGE_BYTES = 24 << 20
# ext2 knows no fallocate(): there a full disk is noticed by the write itself.
MOUNTS = {
    "tmpfs": "mount -t tmpfs -o size=24m none disk",
    "ext4": "mkfs.ext4 -q -O ^has_journal image && mount -o loop image disk",
    "ext2": "mkfs.ext2 -q image && mount -o loop image disk",
    # A disk that promises more than it has: what does not fit is EIO, of the device itself.
    "thin": "mount -t tmpfs -o size=24m none under && truncate -s 64M under/image && "
    "mkfs.ext4 -q -O ^has_journal under/image && mount -o loop,discard under/image disk",
    "overlay": "mount -t tmpfs -o size=24m none under && mkdir under/a under/b low && "
    "mount -t overlay -o lowerdir=low,upperdir=under/a,workdir=under/b none disk",
}


def filled_up(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """full_disk.py, in a name space where folder/disk is such a file system."""
    for name in ("disk", "under"):
        (folder / name).mkdir()
    with (folder / "image").open("wb") as image:
        image.truncate(IMAGE_BYTES)
    filled = folder / ("under" if kind == "thin" else "disk")
    worker = ("-m", "tests.python.full_disk", folder / "disk", filled)
    return Running(*worker, mount=MOUNTS[kind], folder=folder).wait()


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_disk_that_fills_up(kind: str, tmp_path: Path) -> None:
    told = "mounting needs root"
    if os.geteuid() == 0:
        ended = filled_up(kind, tmp_path)
        if ended.returncode != NOT_MOUNTED:
            assert ended.returncode == 0, ended.stdout + ended.stderr
            return
        told = f"{kind} cannot be mounted here: {ended.stderr.strip()}"
    if os.environ.get("KVSWAP_TEST_ALL_DISKS") == "1":
        pytest.fail(told)
    pytest.skip(told)
