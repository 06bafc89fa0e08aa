"""Promises that only another process can see kept: memory, and nothing left behind.

Each test runs a script of its own, so that its memory and its end are the operating system's word.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.python import ready_python

PREAMBLE = """
import os, sys, time
import torch
torch.set_num_threads(min(2, len(os.sched_getaffinity(0))))
from transformers import LlamaConfig, LlamaForCausalLM
from kvswap_torch import KVSwapCache, SwapConfig

config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=4, head_dim=64,
                     max_position_embeddings=1 << 17)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
folder = sys.argv[1]

def read(cache, tokens, chunk=512):
    with torch.no_grad():
        for begin in range(0, tokens, chunk):
            ids = torch.randint(64, (1, min(chunk, tokens - begin)))
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
"""


def script(body: str, folder: Path, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(body), str(folder), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return output


def told(body: str, folder: Path, *arguments: str) -> str:
    """What such a script writes, where neither its imports nor its end are what is looked at."""
    return ready_python.run("-c", PREAMBLE + textwrap.dedent(body), folder, *arguments)


MEASURE = """
    import resource
    budget, tokens = int(sys.argv[2]), int(sys.argv[3])
    with KVSwapCache(model, path=folder, kv_memory_bytes=budget, max_context=8448,
                     max_batch=1) as cache:
        read(cache, tokens)
        with torch.no_grad():
            for _ in range(20):
                model(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        stats = cache.stats()
        assert stats.resident_bytes_peak <= budget, (stats.resident_bytes_peak, budget)
        assert cache.get_seq_length() == tokens + 20
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_stays_inside_the_budget_seen_from_outside(tmp_path):
    budget, allocator_slack = 12 << 20, 6 << 20
    tiny = int(told(MEASURE, tmp_path, str(budget), "1024"))
    full = int(told(MEASURE, tmp_path, str(budget), "8192"))
    # The full cache of 8K tokens takes 64 MiB.
    assert full - tiny <= budget + allocator_slack


def test_passing_tensors_leave_no_holes_behind(tmp_path):
    """What a session keeps must not stand between tensors that come and go."""
    output = told(
        """
        def anonymous():
            status = open("/proc/self/status").read()
            return int(status.split("RssAnon:")[1].split()[0]) << 10

        with KVSwapCache(model, path=folder, config=SwapConfig(rank=8)) as cache:
            session = cache.driver.session
            basis = torch.linalg.qr(torch.randn(256, 16))[0]
            for layer in range(4):
                session.set_projection(layer, basis, basis)

            def fill(chunks):
                for _ in range(chunks):
                    for layer in range(4):
                        keys = torch.randn(1, 4, 2048, 64)
                        session.append(layer, keys, keys.flip(-1))

            fill(4)
            before = anonymous(), cache.stats().resident_bytes
            fill(24)
            after = anonymous(), cache.stats().resident_bytes
            print(after[0] - before[0] - (after[1] - before[1]))
        """,
        tmp_path,
    )
    passed, slack = 24 * 4 * 2 * (2048 * 256 * 4), 16 << 20
    assert int(output) < slack < passed / 16


def test_nothing_is_left_after_kill_9(tmp_path):
    process = script(
        """
        cache = KVSwapCache(model, path=folder)
        read(cache, 1024)
        print("filled", flush=True)
        time.sleep(60)
        """,
        tmp_path,
    )
    assert process.stdout.readline() == "filled\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        *(pytest.param(end, marks=pytest.mark.long) for end in ("sys.exit(0)", "cache = None")),
    ],
)
def test_nothing_is_left_after_the_interpreter_ends(tmp_path, end):
    finish(
        script(
            f"cache = KVSwapCache(model, path=folder)\n    read(cache, 600)\n    {end}".replace(
                "\n    ", "\n"
            ),
            tmp_path,
        )
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_mid_prefill_loses_nothing_else(tmp_path):
    output = told(
        """
        from kvswap_torch.errors import BudgetError, StorageError
        from transformers import DynamicCache
        cache = KVSwapCache(model, path=folder, config=SwapConfig(disk_quota_bytes=4 << 20))
        try:
            read(cache, 8192)
        except (BudgetError, StorageError) as error:
            print(error)
        else:
            raise AssertionError("8192 tokens cannot fit in 4 MiB")
        cache.close()
        assert os.listdir(folder) == []
        ids = torch.arange(10).unsqueeze(0)
        before = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        with KVSwapCache(model, path=folder) as cache:
            after = model.generate(ids, past_key_values=cache, max_new_tokens=5,
                                   do_sample=False, pad_token_id=0)
        assert torch.equal(before, after)
        """,
        tmp_path,
    )
    assert "quota" in output


def test_a_forked_child_is_refused(tmp_path):
    told(
        """
        with KVSwapCache(model, path=folder) as cache:
            read(cache, 600)
            child = os.fork()
            if child == 0:
                # In a child this may wait for ever, for threads that were not forked.
                torch.nn.Linear.forward = lambda *arguments: os._exit(5)
                try:
                    read(cache, 1)
                except ValueError as error:
                    os._exit(0 if "forked child" in str(error) else 3)
                os._exit(4)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            read(cache, 1)
        """,
        tmp_path,
    )
