"""Random caches, lengths and faults in one process, for as long as one likes: `make soak`.

    python -m tests.soak --seconds 3600 --seed 1

Each turn compares its tokens with a turn without faults, and at the end memory, descriptors,
threads and the disk's free space must be where they were after the first turns. The disk is an
image with ext4 of the program's own; where none can be mounted it is the temporary folder's, which
others write to, and free space is only told.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.errors import ClosedError, StorageError
from tests.python.faulty_kernel import FaultyKernel, faulty_kernel
from tests.python.tiny_models import SMALL, tiny_model

WARM_UP_TURNS = 10
DISK_BYTES = 512 << 20
CANNOT_MOUNT = 77
# What stays in memory for what it was paid; nothing, mostly.
KEEPERS: tuple[dict, ...] = (
    {},
    {},
    {"keeper": "observed", "keep_tokens": 10, "keep_window": 3, "keep_interval": 4},
    {"keeper": "arkv", "keep_tokens": 10, "keep_window": 3, "keep_variance": 263.8},
    {"keeper": "arkv", "keep_tokens": 10, "keep_window": 3, "keep_ratio": None},
    {"keeper": "heavy", "keep_tokens": 8, "keep_window": 2, "keep_interval": 1},
)
FREE_BYTES_SLACK = 1 << 20  # the file system's own
RESIDENT_BYTES_MAX = 64 << 20  # more than after the warm-up: the heap's own holes


def measured(folder: Path) -> dict[str, int]:
    """What must come back."""
    statistics = Path("/proc/self/status").read_text().split()
    disk = os.statvfs(folder)
    return {
        "resident": int(statistics[statistics.index("VmRSS:") + 1]) << 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(statistics[statistics.index("Threads:") + 1]),
        "free": disk.f_bavail * disk.f_frsize,
    }


def generate(model, folder: Path, config: SwapConfig, chooser: random.Random, kernel=None):
    """Some passes; each that fails is made again with a disk that is well."""
    told = []

    def persist(step):
        for _ in range(3):
            try:
                return step()
            except StorageError:
                assert kernel is not None
                kernel.heal()
        raise AssertionError("three failures in a row, two of them on a disk that is well")

    opened = persist(lambda: KVSwapCache(model, path=folder, config=config))
    with opened as cache, torch.no_grad():
        batch = chooser.choice((1, 1, 2, 4))
        for _ in range(chooser.randint(1, 12)):
            new = torch.randint(3, 97, (batch, chooser.choice((1, 1, 1, 2, 7, 30, 90))))
            logits = persist(
                lambda new=new: model(new, **cache_argument(model, cache)).logits[:, -1]
            )
            told.append(logits.argmax(-1))
            if chooser.random() < 0.1 and cache.get_seq_length() > 8:
                fewer = -chooser.randint(1, 8)
                persist(lambda fewer=fewer: cache.crop(fewer))
    return told


def turn(model, folder: Path, seed: int, kernel: FaultyKernel) -> int:
    """One cache without faults and the same with; returns how many were injected."""
    chooser = random.Random(seed)
    config = SwapConfig(
        groups_max=chooser.choice((4, 12, 100)),
        pages_max=chooser.choice((100, 140)),
        reader=chooser.choice(("auto", "threads", "sync")),
        **chooser.choice(KEEPERS),
        **SMALL,
    )
    inner = chooser.randrange(1 << 30)
    kernel.heal()
    torch.manual_seed(seed)
    expected = generate(model, folder, config, random.Random(inner))
    kernel.arm(
        chooser.choice(("read", "write", "allocate")),
        nth=chooser.randint(1, 60),
        lasts=chooser.random() < 0.5,
        error=chooser.choice((errno.EIO, errno.ENOSPC, errno.EAGAIN, errno.ENODEV)),
        delay_us=chooser.choice((0, 0, 300)),
    )
    torch.manual_seed(seed)
    told = generate(model, folder, config, random.Random(inner), kernel)
    kernel.heal()
    if not all(map(torch.equal, told, expected)):
        raise AssertionError(f"seed {seed}: other tokens after a fault")
    return kernel.injected


def close_under_another_thread(model, folder: Path, seed: int) -> None:
    """The usual pattern of streaming, left early."""
    config = SwapConfig(groups_max=100, pages_max=100, **SMALL)
    with KVSwapCache(model, path=folder, config=config) as cache:

        def work() -> None:
            ids = torch.randint(3, 97, (1, 40))
            with contextlib.suppress(ClosedError):
                model.generate(
                    ids, **cache_argument(model, cache), max_new_tokens=30, do_sample=False
                )

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(random.Random(seed).uniform(0, 0.05))
    thread.join()


def soak_on_own_disk(asked: argparse.Namespace) -> int:
    """In a name space of its own, where what is mounted goes with the process."""
    script = (
        f'cd "$1" && truncate -s {DISK_BYTES} image && mkfs.ext4 -q image && mkdir disk && '
        f'mount -o loop image disk || exit {CANNOT_MOUNT}; cd "$2"; shift 2; exec "$@"'
    )
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tests.soak", "--folder", f"{name}/disk"]
        command += ["--seconds", str(asked.seconds), "--seed", str(asked.seed)]
        whole = ["unshare", "-m", "sh", "-c", script, "sh", name, os.getcwd(), *command]
        try:
            return subprocess.run(whole, check=False).returncode
        except OSError:
            return CANNOT_MOUNT


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=3600)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--folder", type=Path, help="on a disk that nobody else writes to")
    asked = arguments.parse_args()
    if asked.folder is None:
        result = soak_on_own_disk(asked)
        if result != CANNOT_MOUNT:
            return result
        print("soak: no disk of its own can be mounted here", file=sys.stderr)
    torch.set_num_threads(1)
    models = [tiny_model("llama"), tiny_model("qwen3")]
    turns = injected = 0
    with tempfile.TemporaryDirectory(dir=asked.folder) as name, faulty_kernel() as kernel:
        folder = Path(name)
        before = measured(folder)
        end = time.monotonic() + asked.seconds
        while time.monotonic() < end or turns <= WARM_UP_TURNS:
            seed = asked.seed + turns
            injected += turn(models[turns % 2], folder, seed, kernel)
            if turns % 5 == 0:
                close_under_another_thread(models[0], folder, seed)
            turns += 1
            if turns == WARM_UP_TURNS:
                before = measured(folder)
        after = measured(folder)
        left = os.listdir(folder)
    print(f"soak: {turns} turns from seed {asked.seed}, {injected} faults; {before} -> {after}")
    grew = after["resident"] - before["resident"] > RESIDENT_BYTES_MAX
    same = all(after[name] == before[name] for name in ("descriptors", "threads"))
    lost = before["free"] - after["free"] > FREE_BYTES_SLACK and asked.folder is not None
    if grew or not same or left or lost:
        print("soak: something was not given back", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
