"""What tests may skip, and only where it is true: any other skip of a C++ test, or of a Python test
of faults, sessions and caches, makes `make test` red.

    python -m tests.known_skips build/core/Testing/Temporary/LastTest.log

reads what ctest left; tests/conftest.py asks for pytest where KVSWAP_KNOWN_SKIPS is 1. A machine
that lacks something (no io_uring, no mounts) is asked itself, not the test that says so.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

SYS_IO_URING_SETUP = 425
SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine())
SECCOMP_GET_ACTION_AVAIL, SECCOMP_RET_ERRNO = 2, 0x00050000


def _always() -> bool:
    return True


@functools.cache
def lacks_uring() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    descriptor = libc.syscall(SYS_IO_URING_SETUP, 4, parameters)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor < 0


def _fails(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    except OSError:
        return True


@functools.cache
def lacks_mounts() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return _fails("unshare", "-m", "mount", "-t", "tmpfs", "none", folder)


@functools.cache
def lacks_loops() -> bool:
    """Images of ext2 and ext4 need loop devices and the tools to make them."""
    with tempfile.TemporaryDirectory() as folder:
        script = "truncate -s 4M i && mkfs.ext2 -q i && mkdir d && mount -o loop i d"
        return _fails("unshare", "-m", "sh", "-c", f"cd {folder} && {script}")


@functools.cache
def lacks_sectors() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        script = "truncate -s 4M i && losetup -d $(losetup -f --show -b 4096 i)"
        return lacks_loops() or _fails("sh", "-c", f"cd {folder} && {script}")


@functools.cache
def lacks_overlays() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        script = (
            'mount -t tmpfs none . && cd "$PWD" && mkdir a b c d && '
            "mount -t overlay -o lowerdir=a,upperdir=b,workdir=c none d"
        )
        return _fails("unshare", "-m", "sh", "-c", f"cd {folder} && {script}")


@functools.cache
def lacks_mounts_of_users() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return _fails("unshare", "-U", "-r", "-m", "mount", "-t", "tmpfs", "none", folder)


@functools.cache
def lacks_device_mapper() -> bool:
    return _fails("dmsetup", "version")


def lacks_seccomp() -> bool:
    return SYS_SECCOMP is None or not Path("/proc/sys/kernel/seccomp/actions_avail").exists()


@functools.cache
def lacks_vmsplice() -> bool:
    """A page of memory in a pipe, where it outlives the memory."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    vector = (ctypes.c_size_t * 2)(at, mmap.PAGESIZE)
    ends = os.pipe()
    sent = ctypes.CDLL(None).vmsplice(ends[1], vector, ctypes.c_size_t(1), 0)
    for end in ends:
        os.close(end)
    return sent != mmap.PAGESIZE


def lacks_shared_memory() -> bool:
    return (
        not Path("/dev/shm").is_dir()
        or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev
    )


def lacks_cgroups() -> bool:
    """That this process may make, with a limit on memory."""
    from bench.side_by_side.memory_cap import MemoryCap

    cap = MemoryCap.open()
    if cap is not None:
        cap.close()
    return cap is None


@functools.cache
def lacks_disk() -> bool:
    """Files of tests lie in memory."""
    named = subprocess.run(
        ("stat", "-f", "-c", "%T", tempfile.gettempdir()), capture_output=True, check=False
    )
    return named.stdout.decode().strip() in ("tmpfs", "ramfs")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def lacks_gpu() -> bool:
    return not has_gpu()


# What a test says, and who says whether it is so here.
KNOWN: tuple[tuple[str, Callable[[], bool]], ...] = (
    # A reference in plain torch, beside which the real thing is tested.
    (r"the reference (keeps|has) ", _always),
    # What no CI fetches: the real model, and the packages that convert it.
    (r"make real-model ", _always),
    (r"the reference prefetches nothing", _always),
    # Of a processor whose products of 16 bits are made without oneDNN's code.
    (r"products of other shapes leave no code here", _always),
    (r"could not import '(llama_cpp|ollm|pypdf|torchao|bitsandbytes|jsonschema)", _always),
    (r"no dependency of the tests", _always),
    # Programs that examples/serving and the server's page are for.
    (r"there is no (promtool|caddy|nginx|chromium|playwright|systemd-analyze)", _always),
    (r"cannot repeat a batch for beams", _always),
    # The environment of a worktree that borrows another's.
    (r"this environment is not the tree's", _always),
    # tmpfs takes no O_DIRECT, whatever the machine.
    (r"must take O_DIRECT because the mode is direct", _always),
    (r"io_uring|a ring", lacks_uring),
    (r"a small file system cannot be mounted here", lacks_mounts),
    (r"a file system without O_DIRECT cannot be mounted here", lacks_mounts),
    (r"tmpfs cannot be mounted here|mounting needs root", lacks_mounts),
    (r"ext[24] cannot be mounted here", lacks_loops),
    (r"thin cannot be mounted here", lacks_loops),
    (r"4,096-byte sectors cannot be mounted here", lacks_sectors),
    (r"overlay cannot be mounted here", lacks_overlays),
    (r"a child may not mount here", lacks_mounts_of_users),
    (r"device mapper", lacks_device_mapper),
    (r"no memory cgroup is writable here", lacks_cgroups),
    (r"the folder of the tests lies in memory", lacks_disk),
    (r"seccomp filters are refused here", lacks_seccomp),
    (r"vmsplice is refused here", lacks_vmsplice),
    (r"/dev/shm", lacks_shared_memory),
    (r"there is a GPU", has_gpu),
    (r"needs a CUDA device", lacks_gpu),
)


# What the world does to the program is tried here; of other Python tests, skips are only told.
WATCHED = ("real_disks", "little_memory", "hf_faults", "test_session", "hf_cache", "files_differ")


def is_known(reason: str) -> bool:
    return any(re.search(pattern, reason) and holds() for pattern, holds in KNOWN)


def skips_of_ctest(log: str) -> list[str]:
    """The line after `file.cpp:12: Skipped`, of every test that was skipped."""
    lines = log.splitlines()
    return [
        lines[number + 1].strip() if number + 1 < len(lines) else ""
        for number, line in enumerate(lines)
        if line.endswith(": Skipped")
    ]


def report(reasons: list[str]) -> list[str]:
    """A line for each reason, how often and whether it is known."""
    counted = Counter(re.sub(r"'[^']*'", "a folder", reason) for reason in reasons)
    verdicts = {re.sub(r"'[^']*'", "a folder", reason): is_known(reason) for reason in reasons}
    return [
        f"{count} x {reason}{'' if verdicts[reason] else '   <- not in tests/known_skips.py'}"
        for reason, count in counted.most_common()
    ]


def main() -> int:
    reasons = skips_of_ctest(Path(sys.argv[1]).read_text(errors="replace"))
    if reasons:
        print("skipped:", *report(reasons), sep="\n  ")
    return 0 if all(map(is_known, reasons)) else 1


if __name__ == "__main__":
    sys.exit(main())
