"""Models of every kind of layer, saved and opened in another process.

`make saved-models` takes every model that a cache can be opened for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kvswap_torch import KVSwapCache, UnsupportedModelError
from tests.python.every_model import build, families
from tests.python.test_saving import ROOT, goes_on
from tests.python.tiny_models import TIGHT, greedy, has_native, prompt

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
PADDING = (0, 5)
# Attention alone, and beside it: windows, state spaces, gated deltas, convolutions, shared keys.
SOME = ("GPTNeoX", "GptOss", "Gemma3n", "Qwen3Next", "KimiLinear", "Bamba", "Zamba2", "Lfm2")

CHILD = """
    import json, sys, torch
    from kvswap_torch import KVSwapCache
    from tests.python.every_model import build
    from tests.python.test_saving import goes_on
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        model = build(job["family"])
        with KVSwapCache.open(model, job["saved"], path=job["path"]) as cache:
            tokens = goes_on(model, cache, torch.tensor(job["out"]), job["padding"])
            print(json.dumps([tokens, cache.stats().probe]), flush=True)
"""


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def child():
    command = [sys.executable, "-c", textwrap.dedent(CHILD)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        yield process
        process.stdin.close()


def test_another_process_goes_on(tmp_path: Path, child: subprocess.Popen) -> None:
    wrong = {}
    chosen = families() if os.environ.get("KVSWAP_TEST_ALL_SAVED") else SOME
    for family in chosen:
        model = build(family)
        saved = tmp_path / family
        try:
            cache = KVSwapCache(model, tmp_path, TIGHT)
        except UnsupportedModelError:
            continue
        with cache:
            out = greedy(model, prompt(2, 40, padding=PADDING), cache, tokens=4)
            cache.save(saved)
            expected = goes_on(model, cache, out, PADDING)
        job = {"family": family, "saved": str(saved), "path": str(tmp_path),
               "out": out.tolist(), "padding": PADDING}  # fmt: skip
        print(json.dumps(job), file=child.stdin, flush=True)
        tokens, probe = json.loads(child.stdout.readline())
        if tokens != expected or not probe.startswith(("passed", "skipped: this model")):
            wrong[family] = probe
    assert wrong == {}
