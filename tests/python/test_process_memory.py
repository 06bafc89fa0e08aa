"""What the whole process takes: memory is given back, and told beside the ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvswap_torch import process_memory
from kvswap_torch.half_linear import has_products
from kvswap_torch.process_memory import CODE_CACHES, COST_SHARE_MAX, MemoryReturns

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
#: Above the loaded model and the ledger, in MiB.
SETTLED_MAX, PEAK_MAX = 32, 96

READ_A_PROMPT = """
import gc, json, sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from kvswap_torch import KVSwapCache
from kvswap_torch.process_memory import process_memory
model = AutoModelForCausalLM.from_pretrained("examples/reference_model").eval()
ids = torch.randint(3, 3000, (1, 6144), generator=torch.Generator().manual_seed(1))
mask, new = torch.ones_like(ids), {"do_sample": False, "max_new_tokens": 8}
with torch.no_grad():
    model(ids[:, :64])  # what libraries take once
gc.collect()
loaded = process_memory().rss
with KVSwapCache(model, sys.argv[1], kv_memory_bytes="8MiB") as cache:
    model.generate(ids, attention_mask=mask, past_key_values=cache, **new)
    stats = cache.stats().as_dict()
    print(json.dumps({"loaded": loaded, **stats["process"], "ledger": stats["resident_bytes"]}))
"""


def run(program: str, *arguments: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        # A command that another test called in this process may have set these.
        env={name: value for name, value in os.environ.items() if name not in CODE_CACHES},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_prompt_takes_the_ledger_and_little_more(tmp_path):
    """A pass in one piece took far more, and what it freed stayed with the C library."""
    found = run(READ_A_PROMPT, str(tmp_path))
    above = {name: (found[name] - found["loaded"] - found["ledger"]) / MIB for name in found}
    assert above["rss"] <= SETTLED_MAX, found
    assert above["peak"] <= PEAK_MAX, found
    assert found["anonymous"] < found["rss"] <= found["peak"]


GIVE_BACK = """
import json
from kvswap_torch.process_memory import give_back_memory, process_memory
held = [bytearray(4000) for _ in range(50_000)]
before = process_memory().anonymous
held = held[::500]  # each of them holds the heap's end
freed = process_memory().anonymous
given = give_back_memory()
print(json.dumps({"before": before, "freed": freed, "after": process_memory().anonymous,
                  "given": given}))
"""


def test_what_was_freed_goes_back_to_the_system():
    found = run(GIVE_BACK)
    assert found["given"]
    assert found["freed"] - found["after"] > 100 * MIB, found


def test_where_the_c_library_cannot_nothing_is_given_back(monkeypatch):
    monkeypatch.setattr(process_memory, "_malloc_trim", lambda: None)
    assert process_memory.give_back_memory() is False


CODE = """
import json, sys, torch
torch.set_num_threads(1)
from kvswap_torch.process_memory import keep_little_code, process_memory
if sys.argv[1] == "little":
    keep_little_code()
layers = [torch.nn.Linear(256, outputs, bias=False).bfloat16() for outputs in (256, 512, 768)]
def read(lengths):
    with torch.inference_mode():
        for tokens in lengths:
            for layer in layers:
                layer(torch.ones(1, tokens, 256, dtype=torch.bfloat16))
read(range(400, 410))
before = process_memory().anonymous
read(range(410, 470))
print(json.dumps({"grown": process_memory().anonymous - before}))
"""


@pytest.mark.skipif(not has_products(torch.bfloat16), reason="no products of bf16: no such code")
def test_code_for_prompts_of_many_lengths_is_not_kept():
    """By oneDNN, of the layers of a model; an environment of the user's own stays."""
    kept, little = run(CODE, "as it is")["grown"], run(CODE, "little")["grown"]
    if kept < 16 * MIB:
        pytest.skip("products of other shapes leave no code here")
    assert little < kept / 4, (little, kept)


def test_what_the_environment_says_of_code_stays(monkeypatch):
    _, theirs = process_memory.CODE_CACHES
    environment = {theirs: "77"}
    monkeypatch.setattr(process_memory.os, "environ", environment)
    process_memory.keep_little_code()
    assert environment == process_memory.CODE_CACHES | {theirs: "77"}


@pytest.mark.parametrize("cost", [0.0001, 0.004, 0.5])
def test_giving_back_costs_its_share_at_most(monkeypatch, cost):
    """However long it takes, and however short the passes are."""
    now = [0.0]

    def give_back() -> bool:
        now[0] += cost
        return True

    monkeypatch.setattr(process_memory.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(process_memory, "give_back_memory", give_back)
    returns, worked, times = MemoryReturns(), 0.0, 0
    for pass_seconds in [0.3, 0.02, 1.7, 0.001] * 500:
        worked += pass_seconds
        times += returns.after(pass_seconds)
    first = cost  # of which nothing was known
    assert times * cost - first <= COST_SHARE_MAX * worked
    assert times >= 1


def test_the_most_is_that_since_a_cache_was_opened(monkeypatch):
    told = [(100, 60, 900)]  # rss, anonymous, peak of the whole life

    def read() -> process_memory.ProcessMemory:
        return process_memory.ProcessMemory(*told[-1])

    monkeypatch.setattr(process_memory, "process_memory", read)
    returns = MemoryReturns()
    told.append((300, 60, 900))
    assert returns.memory().peak == 300
    told.append((200, 60, 900))
    assert returns.memory() == process_memory.ProcessMemory(200, 60, 300)
    told.append((200, 60, 950))
    assert returns.memory().peak == 950
