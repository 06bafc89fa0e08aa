"""A model of twice the memory that its process may have more. For test_weights_memory.

python -m tests.python.weights_in_little_memory MODEL CGROUP|none WEIGHTS_MEMORY|none

prints the tokens of an answer, what weights were read, and the cgroups it ended in.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from kvswap_torch import KVSwapCache
from kvswap_torch.cli.load import load_model
from tests.python.tiny_models import TIGHT, greedy, prompt, tiny_model

CONFIG = TIGHT.with_settings({"prefetch.mode": "verify"})


def answer(model: object, folder: str) -> tuple[list[list[int]], int | None]:
    with KVSwapCache(model, folder, config=CONFIG) as cache:
        return greedy(model, prompt(1, 40), cache).tolist(), cache.stats().weights_bytes_read


def main() -> None:
    folder, cgroup, memory = sys.argv[1:]
    torch.set_num_threads(1)
    answer(tiny_model("llama", dtype=torch.bfloat16), folder)  # code that is loaded late
    for file in Path(folder).glob("*.safetensors"):  # pages that are there count where they came
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cgroup != "none":
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    limit = None if memory == "none" else int(memory)
    ids, read = answer(load_model(folder, weights_memory=limit), folder)
    cgroups = Path("/proc/self/cgroup").read_text()
    print(json.dumps({"ids": ids, "read": read, "cgroups": cgroups}))


if __name__ == "__main__":
    main()
