"""Fills a mounted disk under a cache, makes room, goes on; then unmounts it. For test_real_disks.

python -m tests.python.full_disk /mounted/disk /what/is/filled
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.errors import CorruptionError, StorageError
from tests.python.tiny_models import SMALL, tiny_model

SECTOR = 4096


def free_bytes(disk: Path) -> int:
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_frsize


def fill(disk: Path) -> Path:
    """A file that leaves nothing, or all but nothing."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * SECTOR)
        except OSError:
            pass
    return ballast


class Text:
    """Passes over a text; a disk that is full is made room on, and the pass run again."""

    def __init__(self, model, filled: Path):
        self.model, self.filled, self.refused = model, filled, 0

    def tell(self, cache: KVSwapCache, full_at: tuple[int, ...] = ()) -> list[torch.Tensor]:
        """What is likely after each pass: prefill, a second chunk, decoding."""
        told = []
        new = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(3))
        for turn in range(8):
            ballast = fill(self.filled) if turn in full_at else None
            try:
                logits = self.model(new, **cache_argument(self.model, cache)).logits[:, -1:]
            except StorageError as error:
                self.refused += 1
                assert error.errno and error.filename, error
                assert ballast is not None, error
                ballast.unlink()
                logits = self.model(new, **cache_argument(self.model, cache)).logits[:, -1:]
            if ballast is not None:
                ballast.unlink(missing_ok=True)
            told.append(logits)
            new = new.flip(1) if turn == 0 else logits.argmax(-1)
        return told

    def give_up(self, cache: KVSwapCache) -> None:
        """A text that fails and is not gone on with."""
        ballast = fill(self.filled)
        try:
            self.model(torch.full((2, 400), 7), **cache_argument(self.model, cache))
        except StorageError:
            self.refused += 1
        ballast.unlink()
        cache.reset()


@torch.no_grad()
def main() -> None:
    disk, filled = map(Path, sys.argv[1:])
    warnings.simplefilter("ignore", RuntimeWarning)  # a folder in memory, no preallocation
    model = tiny_model("llama")
    for reader in ("auto", "threads", "sync"):
        # Groups that a disk of blocks of 4 KiB takes.
        settings = SMALL | {"group_tokens": 16, "groups_max": 3, "pages_max": 9}
        config = SwapConfig(reader=reader, **settings)
        before = free_bytes(disk)
        text = Text(model, filled)
        with KVSwapCache(model, path=disk, config=config) as cache:
            undisturbed = text.tell(cache)
        with KVSwapCache(model, path=disk, config=config) as cache:
            try:
                told = text.tell(cache, full_at=(0, 1, 5))
            except (
                CorruptionError
            ):  # a write that the disk had taken was lost: nothing of it is used
                text.refused += 1
                cache.reset()
                told = text.tell(cache)
            assert all(map(torch.equal, told, undisturbed)), reader
            text.give_up(cache)
            assert all(map(torch.equal, text.tell(cache), undisturbed)), reader
        assert free_bytes(disk) >= before, reader
        assert text.refused >= 2, (reader, text.refused)
    subprocess.run(["umount", str(disk)], check=True)


if __name__ == "__main__":
    main()
