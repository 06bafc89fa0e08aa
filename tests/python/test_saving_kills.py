"""Whatever kills a process that saves, a saved cache is whole or absent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.python.test_saving import ROOT
from tests.python.tiny_models import has_native

if has_native():
    from kvswap_torch import _C
pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
REPEATS = 50 if os.environ.get("KVSWAP_TEST_ALL_SAVED") else 12

# Imports once; each line of its input is one child, which saves and waits to be killed.
SAVER = """
    import os, sys, time, torch
    from kvswap_torch import KVSwapCache
    from tests.python.test_saving import filled
    from tests.python.tiny_models import forward, prompt, tiny_model
    torch.set_num_threads(1)

    def save(folder):
        cache, _ = filled(tiny_model("llama"), folder)
        print(os.getpid(), flush=True)
        cache.save(folder + "/a", overwrite=True)
        time.sleep(600)

    for line in sys.stdin:
        if os.fork() == 0:
            save(line.strip())
        os.wait()
        print("ended", flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    saver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    moments = random.Random(1)
    wholes = 0
    with saver:
        for _ in range(REPEATS):
            print(tmp_path, file=saver.stdin, flush=True)
            child = int(saver.stdout.readline())
            time.sleep(moments.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            assert saver.stdout.readline() == "ended\n"
            if (tmp_path / "a").exists():
                _C.SavedCache(str(tmp_path / "a")).verify()
                wholes += 1
        saver.stdin.close()
    assert wholes > 0
    left = [path for path in tmp_path.iterdir() if path.name != "a"]
    assert len(left) <= 1, "each save removes what one before it has left"
    _C.SavedCache.remove(str(tmp_path / "a"))
