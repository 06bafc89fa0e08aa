"""Every errno on every file of a saved cache, while a server opens, scans, saves, evicts, restarts.

An answer is the right one, or there is an error of ours; when the disk is well again, all answers
are right. `python -m tests.python.test_serving_disks --seconds 3600` goes on for as long as is
wanted, each round with another seed.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvswap_torch.errors import KVSwapError
from tests.how_long import lives
from tests.python.faulty_kernel import FaultyKernel, faulty_kernel
from tests.python.test_serving_reuse import Desk, asked, in_memory, text
from tests.python.tiny_models import has_native, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
FILES = ("manifest.json", "state.safetensors", "records.bin")
CALLS = ("open", "read", "facts", "write", "allocate")
ALL_ERRNOS = (
    *(errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE),
    *(errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),
)
ERRNOS = lives(ALL_ERRNOS[::2], ALL_ERRNOS)
BOOKS = 4


class World:
    """A store of some documents, and what is asked of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.model, self.folder = tiny_model("llama"), folder
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.right: dict[tuple[int, int], list[int]] = {}
        self.desk = Desk(self.model, folder)
        for book in range(BOOKS):
            self.ask(book)
        self.limit = self.desk.store.bytes * 2

    def ask(self, book: int | None = None) -> None:
        """The right answer, or an error."""
        book = self.random.randrange(BOOKS) if book is None else book
        question = self.random.randrange(3)
        ids = asked(text(60, book), question)
        if (book, question) not in self.right:
            self.right[book, question] = in_memory(self.model, ids)
        assert self.desk.ask(ids) == self.right[book, question]

    # What a server does with its store.

    def open(self) -> None:
        self.desk.reuse.close()
        self.ask()

    def scan(self) -> None:
        self.desk.store._entries.clear()
        self.desk.store.refresh()

    def save(self) -> None:
        """A document that no cache has."""
        ids = text(50, self.random.randrange(1000, 1 << 30))
        assert self.desk.ask(ids) == in_memory(self.model, ids)

    def evict(self) -> None:
        self.desk.store.make_room(self.desk.store._limit_bytes - self.desk.store.bytes // 2)

    def restart(self) -> None:
        self.desk.reuse.close()
        self.desk = Desk(self.model, self.folder, self.limit)
        self.ask()

    def strike(self, kernel: FaultyKernel, file: str, number: int, act: Callable[[], None]) -> None:
        """One fault while something is done; then the disk is well, and so is every answer."""
        call, nth = self.random.choice(CALLS), self.random.choice([1, 1, 2, 3])
        name = "" if call in ("write", "allocate") else file
        kernel.arm(call, nth, lasts=self.random.random() < 0.5, error=number, name=name)
        try:
            act()
        except (KVSwapError, OSError) as error:
            self.done["errors"] += 1
            assert str(error), "with words"
        finally:
            kernel.heal()
        self.done["struck"] += kernel.injected > 0
        self.done[act.__name__] += 1
        self.desk.store.refresh()
        self.ask()

    def round(self, kernel: FaultyKernel) -> None:
        acts = (self.open, self.scan, self.save, self.evict, self.restart)
        all_of = list(itertools.product(FILES, ERRNOS, acts))
        self.random.shuffle(all_of)
        for file, number, act in all_of:
            self.strike(kernel, file, number, act)

    def close(self) -> None:
        self.desk.reuse.close()


def run(folder: Path, seed: int) -> Counter[str]:
    with faulty_kernel() as kernel:
        world = World(folder, seed)
        try:
            world.round(kernel)
        finally:
            world.close()
    return world.done


def test_no_errno_of_no_file_changes_an_answer(tmp_path: Path) -> None:
    done = run(tmp_path, seed=1)
    acts = ("open", "scan", "save", "evict", "restart")
    assert all(done[act] == len(FILES) * len(ERRNOS) for act in acts)
    assert done["struck"] > 6 * len(ERRNOS) and done["errors"] > 5


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ends, total = time.monotonic() + given.seconds, Counter[str]()
    while time.monotonic() < ends:
        folder = Path(tempfile.mkdtemp())
        total += run(folder, given.seed)
        shutil.rmtree(folder)
        print(f"seed {given.seed}: {dict(total)}", flush=True)
        given.seed += 1
