"""Saved caches and a server's store on a mounted disk that is not as others. For test_saving_disks.

python -m tests.python.saved_disk CASE /mounted/disk /another/folder
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from kvswap_torch import KVSwapCache
from kvswap_torch.errors import StorageError
from tests.python.full_disk import fill
from tests.python.saved_conversation import filled, goes_on
from tests.python.saved_files import VERSION_1, inputs_of
from tests.python.test_serving_reuse import Desk, in_memory, text
from tests.python.tiny_models import tiny_model


def read_only(disk: Path, other: Path) -> None:
    """Opened, asked and served from a disk that takes nothing; a save there has its sentence."""
    model = tiny_model("llama")
    with Desk(model, disk, path=other) as desk:
        desk.ask(text(60, 1))
    cache, out = filled(model, other)
    cache.save(disk / "a")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with cache:
        try:
            cache.save(disk / "b")
        except StorageError as error:
            assert "Read-only file system" in str(error)
        else:
            raise AssertionError("it was saved")
        expected = goes_on(model, cache, out)
    with KVSwapCache.open(model, disk / "a", path=other) as opened:
        assert goes_on(model, opened, out) == expected
    with Desk(model, disk, path=other) as desk:
        for seed, cached in ((1, 59), (2, 0), (1, 59)):
            assert desk.ask(text(60, seed)) == in_memory(model, text(60, seed))
            assert desk.cached == cached
        assert desk.counts["save_failures"] > 0


def full(disk: Path, other: Path) -> None:
    """The oldest makes room and nothing is left over; every answer is right; with room all stay."""
    model = tiny_model("llama")
    with Desk(model, disk, path=other) as desk:
        desk.ask(text(60, 1))
        ballast = fill(disk)
        names = len(list(disk.iterdir()))
        for seed, cached in ((2, 0), (2, 59), (1, 0), (3, 0)):
            assert desk.ask(text(60, seed)) == in_memory(model, text(60, seed))
            assert desk.cached == cached
        assert desk.counts["saves"] == 4 and desk.counts["save_failures"] == 0
        assert len(list(disk.iterdir())) == names
        ballast.unlink()
        desk.ask(text(60, 4))
        assert desk.counts["saves"] == 5


def sectors(disk: Path, other: Path) -> None:
    """Records of 512 bytes where 4,096 are read at once: through the page cache, said once."""
    saved = disk / "saved"
    shutil.copytree(VERSION_1 / "covering", saved)
    for place, mode in ((saved, 0o700), *((each, 0o600) for each in saved.iterdir())):
        place.chmod(mode)
    assert json.loads((saved / "manifest.json").read_text())["record_bytes"] % 4096
    out = torch.tensor(json.loads((VERSION_1 / "covering.json").read_text()))
    assert torch.equal(out[:, :40], inputs_of("covering")["input_ids"])
    model = tiny_model("llama")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with KVSwapCache.open(model, saved, path=disk) as cache:
            tokens = goes_on(model, cache, out)
            fallbacks = cache.stats().fallbacks
    assert "reads larger blocks than those the saved records are padded to" in fallbacks
    assert sum(str(each.message).count(fallbacks) for each in said) == 1
    with KVSwapCache.open(model, saved, path=other) as cache:
        assert goes_on(model, cache, out) == tokens
    whole = model.generate(input_ids=out, do_sample=False, min_new_tokens=10, max_new_tokens=10)
    assert tokens == whole.tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {"read_only": read_only, "full": full, "sectors": sectors}
    cases[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
