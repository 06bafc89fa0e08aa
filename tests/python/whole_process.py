"""What a whole process takes for a long text. For test_process_budget.

    python -m tests.python.whole_process generate MODEL FOLDER TOKENS KV_MEMORY
    python -m tests.python.whole_process loaded MODEL
    python -m tests.python.whole_process ingest ...

The first loads a model as README does, reads a text of so many tokens and answers it; the second
reads a few words alone; the third is the command of that name. All print the process's bytes.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvswap_torch import KVSwapCache
from kvswap_torch.process_memory import process_memory

ANSWER_TOKENS, CHUNK_TOKENS = 32, 1024


def loaded_model(folder: str) -> tuple[Any, int]:
    """And the process's bytes once libraries and weights have been used."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        model(torch.arange(3, 67)[None])
    gc.collect()
    return model, process_memory().rss


def generate(folder: str, path: str, tokens: int, memory: str) -> dict[str, int]:
    model, loaded = loaded_model(folder)
    ids = torch.randint(3, 3000, (1, tokens), generator=torch.Generator().manual_seed(1))
    new = {"do_sample": False, "max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS}
    context = tokens + ANSWER_TOKENS
    with KVSwapCache(model, path, kv_memory_bytes=memory, max_context=context) as cache:
        new |= {"attention_mask": torch.ones_like(ids), "prefill_chunk_size": CHUNK_TOKENS}
        model.generate(ids, **cache.as_argument(), **new)
        stats = cache.stats()
        assert stats.tokens == tokens + ANSWER_TOKENS - 1
        return {"loaded": loaded, "ledger": stats.resident_bytes, **asdict(stats.process)}


def command(words: list[str]) -> dict[str, int]:
    from kvswap_torch.cli.app import app

    app(words, standalone_mode=False)
    return asdict(process_memory())


def main() -> None:
    torch.set_num_threads(1)
    what, *words = sys.argv[1:]
    if what == "ingest":
        told = command([what, *words])
    elif what == "loaded":
        told = {"rss": loaded_model(words[0])[1]}
    else:
        folder, path, tokens, memory = words
        told = generate(folder, path, int(tokens), memory)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
