"""Whatever ends a process that saves, a saved cache is whole or absent, and on the disk."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvswap_torch.errors import StorageError
from tests.python.faulty_kernel import striking
from tests.python.saved_child import ROOT
from tests.python.saved_conversation import filled, goes_on
from tests.python.tiny_models import has_native, tiny_model

if has_native():
    from kvswap_torch import _C
pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
REPEATS = 50 if os.environ.get("KVSWAP_TEST_ALL_SAVED") else 8
# `make saved-models` takes every step.
STEPS = range(0, 200, 1 if os.environ.get("KVSWAP_TEST_ALL_SAVED") else 4)

# Imports once; each line of its input is one child, which saves, killed at a step of it or later.
SAVER = """
    import json, os, sys, time, torch
    from kvswap_torch import KVSwapCache
    from tests.python.faulty_kernel import striking
    from tests.python.saved_conversation import filled
    from tests.python.tiny_models import tiny_model
    torch.set_num_threads(1)

    def save(job):
        cache, _ = filled(tiny_model("llama"), job["folder"])
        print("pid", os.getpid(), flush=True)
        if "step" not in job:
            cache.save(job["folder"] + "/a", overwrite=True)
            time.sleep(600)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with striking(job["step"], log=log):
            cache.save(job["folder"] + "/a", overwrite=True)
        os._exit(0)

    for line in sys.stdin:
        if os.fork() == 0:
            save(json.loads(line))
        print(json.dumps(os.wait()[1]), flush=True)
"""


@pytest.fixture
def saver() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        yield process
        process.stdin.close()


def begin(saver: subprocess.Popen, **job: object) -> int:
    print(json.dumps(job), file=saver.stdin, flush=True)
    what, number = saver.stdout.readline().split()  # a child that has failed says no "pid"
    assert what == "pid"
    return int(number)


def end(saver: subprocess.Popen) -> int:
    return json.loads(saver.stdout.readline())


def test_killed_at_any_moment(tmp_path: Path, saver: subprocess.Popen) -> None:
    moments = random.Random(1)
    for repeat in range(REPEATS):
        child = begin(saver, folder=str(tmp_path))
        time.sleep(moments.uniform(0, 0.02))
        while repeat == REPEATS - 1 and not (tmp_path / "a").exists():
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        assert end(saver) == signal.SIGKILL
        if (tmp_path / "a").exists():
            _C.SavedCache(str(tmp_path / "a")).verify()
    left = [path for path in tmp_path.iterdir() if path.name != "a"]
    assert len(left) <= 1, "each save removes what one before it has left"
    _C.SavedCache.remove(str(tmp_path / "a"))


@pytest.mark.parametrize("replaces", [False, True])
def test_killed_or_without_power_at_each_step(
    replaces: bool, tmp_path: Path, saver: subprocess.Popen
) -> None:
    """Where a new folder is named, all in it has reached the disk; where a save ended, its name."""
    folder, log = tmp_path / "disk", tmp_path / "log"
    folder.mkdir()
    saved, kills = folder / "a", 0
    if replaces:
        cache, _ = filled(tiny_model("llama"), folder, tokens=20)
        cache.save(saved)
        cache.close()
    old = saved.stat().st_ino if replaces else None
    for step in STEPS:
        begin(saver, folder=str(folder), step=step, log=str(log))
        ended = end(saver)
        done = [line.split() for line in log.read_text().splitlines()]
        synced = {int(inode) for what, inode in done if what == "synced"}
        if saved.exists():
            _C.SavedCache(str(saved)).verify()
        if saved.exists() and saved.stat().st_ino != old:
            before = done[: done.index(["renamed", "0"])]
            there = {int(inode) for what, inode in before if what == "synced"}
            assert {each.stat().st_ino for each in (saved, *saved.iterdir())} <= there
            assert ended == 0 or step > 0
        else:
            assert saved.exists() == replaces
        if ended == 0:
            assert ["renamed", "0"] in done and done[-1] == ["synced", str(folder.stat().st_ino)]
            assert folder.stat().st_ino in synced
            break
        assert ended == signal.SIGKILL
        kills += 1
        if saved.exists() and saved.stat().st_ino != old:
            _C.SavedCache.remove(str(saved))  # the next one begins as this one did
            if replaces:
                cache, _ = filled(tiny_model("llama"), folder, tokens=20)
                cache.save(saved)
                cache.close()
                old = saved.stat().st_ino
    assert kills >= 40 // STEPS.step // 2
    assert [path.name for path in folder.iterdir()] == ["a"], "the last save has cleared up"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_step_that_fails_leaves_nothing_and_the_cache_goes_on(error: int, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = tiny_model("llama")
    cache, out = filled(model, tmp_path)
    failures = 0
    with cache:
        for step in STEPS:
            try:
                with striking(step, error) as has_struck:
                    cache.save(tmp_path / "a")
            except StorageError as raised:
                assert raised.errno == error and "a" in str(raised.filename)
                failures += 1
                assert list(tmp_path.iterdir()) == []
            else:
                _C.SavedCache(str(tmp_path / "a")).verify()
                _C.SavedCache.remove(str(tmp_path / "a"))
                if not has_struck():
                    break
                # There was another way, or a thread of another cache was struck.
        assert failures > 0
        expected = goes_on(model, cache, out)
    torch.set_num_threads(threads)
    cache, out = filled(model, tmp_path)
    with cache:
        assert goes_on(model, cache, out) == expected
