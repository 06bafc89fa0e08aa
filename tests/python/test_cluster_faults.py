"""Faults under a cache that chooses clusters: one clear error, then the same pass again.

What a fault leaves of clusters, token by token: tests/cpp/engine/test_cluster_updater.cpp.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvswap_torch import KVSwapCache, SwapConfig
from tests.python.faulty_conversation import at_every_call, converse, persistently
from tests.python.faulty_kernel import FaultyKernel, faulty_kernel
from tests.python.saved_child import ROOT
from tests.python.tiny_models import has_native, tiny_model, tokens_of

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]

LAYOUTS = ("sequence", "pools")
CLUSTERS = {
    "grouping": "clusters",
    "rows": "centroid",
    "cluster_tokens": 4,
    "cluster_tokens_max": 10,
    "split_factor": 0.5,
    "pending_tokens": 2,
    "group_tokens": 8,
    "tail_tokens": 4,
    "sink_tokens": 2,
    "select_queries_max": 4,
    "read_depth": 8,
    "replacement": "lru",
}


@pytest.fixture
def disk() -> Iterator[FaultyKernel]:
    with faulty_kernel() as kernel:
        yield kernel


def open_clusters(model: Any, folder: Path | str, layout: str, pages: int) -> KVSwapCache:
    config = SwapConfig(groups_max=pages, pages_max=2 * pages, layout=layout, **CLUSTERS)
    return KVSwapCache(model, path=folder, config=config)


@torch.no_grad()
def go_on(model: Any, cache: KVSwapCache, steps: int) -> None:
    """So many tokens, one at a time: of those that leave the tail some split their clusters."""
    for i in range(steps):
        model(tokens_of(1, 1, seed=100 + i), past_key_values=cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", ["read", "write", "allocate"])
@pytest.mark.pairs(once=["call", "layout"])
def test_the_nth_call_fails_and_the_pass_is_repeated(
    call: str, layout: str, disk: FaultyKernel, tmp_path: Path
) -> None:
    """With room for all: the tokens are those of a disk that is well."""
    model = tiny_model("llama")
    disk.heal()
    failures: list[str] = []

    def opened() -> KVSwapCache:
        return open_clusters(model, tmp_path, layout, pages=40)

    def live(cache: KVSwapCache) -> list[torch.Tensor]:
        return converse(model, cache, 2, lambda step: persistently(step, disk, failures))

    with opened() as cache:
        undisturbed = live(cache)
    at_every_call(disk, call, opened, live, undisturbed)
    assert failures
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", ["read", "write", "allocate"])
@pytest.mark.pairs(once=["call", "layout"])
def test_what_a_fault_left_is_gone_with_the_next_text(
    call: str, layout: str, disk: FaultyKernel, tmp_path: Path
) -> None:
    """With few pages: choices may be others after a fault, but not after reset()."""
    model = tiny_model("llama")
    disk.heal()
    failures: list[str] = []

    def opened() -> KVSwapCache:
        return open_clusters(model, tmp_path, layout, pages=2)

    def live(cache: KVSwapCache) -> list[torch.Tensor]:
        converse(model, cache, 1, lambda step: persistently(step, disk, failures))
        before = cache.get_seq_length()
        persistently(lambda: go_on(model, cache, 40), disk, failures)
        # Of 40 passes the one that failed is the first that is not there.
        assert before + 40 <= cache.get_seq_length() < before + 80
        disk.heal()
        cache.reset()
        return converse(model, cache, 1, lambda step: step())

    with opened() as cache:
        undisturbed = live(cache)
    at_every_call(disk, call, opened, live, undisturbed)
    assert failures
    assert list(tmp_path.iterdir()) == []


# Imports once; each line of its input is one child, which is killed within a call to the disk.
CHILDREN = """
    import json, os, signal, sys, threading, time, torch
    from tests.python.faulty_conversation import converse
    from tests.python.faulty_kernel import faulty_kernel
    from tests.python.test_cluster_faults import go_on, open_clusters
    from tests.python.tiny_models import tiny_model
    torch.set_num_threads(1)

    def end_in(call, nth, folder, layout):
        with faulty_kernel() as disk:
            disk.arm(call, nth=nth, delay_us=30_000_000)
            def watch():
                while disk.injected == 0:
                    time.sleep(0.002)
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=watch, daemon=True).start()
            model = tiny_model("llama")
            cache = open_clusters(model, folder, layout, pages=2)
            converse(model, cache, 1, lambda step: step())
            go_on(model, cache, 60)
        os._exit(7)

    for line in sys.stdin:
        if os.fork() == 0:
            end_in(**json.loads(line))
        print(os.wait()[1], flush=True)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_left_of_a_process_that_is_killed_within_a_call(
    layout: str, tmp_path: Path
) -> None:
    """In appends, splits and a crop, as they come: at any of their reads, writes, allocations."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILDREN)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None and process.stdout is not None
    killed = 0
    for call, places in (("write", (1, 4, 9, 25)), ("read", (1, 6, 30)), ("allocate", (1, 2))):
        for nth in places:
            job = {"call": call, "nth": nth, "folder": str(tmp_path), "layout": layout}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            ended = int(process.stdout.readline())
            assert ended in (signal.SIGKILL, 7 << 8), (call, nth)
            killed += ended == signal.SIGKILL
            assert list(tmp_path.iterdir()) == []
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert killed >= 6
