"""Bad arguments and budgets: refused at construction, the model untouched."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import (
    BudgetError,
    ConfigError,
    KVSwapCache,
    KVSwapError,
    ModelIdentity,
    StorageError,
    SwapConfig,
)
from tests.python.tiny_models import TIGHT, greedy, prompt


def test_bad_arguments(llama, sessions, tmp_path):
    with pytest.raises(ValueError, match="must be a transformers PreTrainedModel, got Linear"):
        KVSwapCache(torch.nn.Linear(2, 2), tmp_path)
    for name, most in (("max_context", 2**31 - 1), ("max_batch", 65536)):
        for number in (0, -1, most + 1, 2**62, 2**80):
            with pytest.raises(ConfigError, match=f"{name}: must be a positive int up to {most}"):
                KVSwapCache(llama, tmp_path, **{name: number})
    with pytest.raises(ConfigError, match="kv_memory_bytes: must be a number with a unit"):
        KVSwapCache(llama, tmp_path, kv_memory_bytes="much")
    with pytest.raises(ConfigError, match="readable JSON"):
        KVSwapCache(llama, tmp_path, config=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="rank: must be an int from 1 to 32"):
        KVSwapCache(llama, tmp_path, config=SwapConfig(rank=33))
    with pytest.raises(ConfigError, match="rank: must be one number or 3"):
        KVSwapCache(llama, tmp_path, config=SwapConfig(rank=(8, 8)))
    with pytest.raises(ConfigError, match=r"kv_heads 4 \(this model: 2\)"):
        KVSwapCache(llama, tmp_path, config=SwapConfig(rank=8, model=ModelIdentity(kv_heads=4)))
    assert llama.config._attn_implementation == "sdpa"


def test_bad_paths(llama, tmp_path, sessions):
    if sessions == "reference":
        pytest.skip("the reference keeps nothing on disk")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(StorageError, match=path.name) as refused:
            KVSwapCache(llama, path)
        told = str(refused.value)
        assert told.startswith("[Errno ") and told.lower().count("errno") == 1 and "::" not in told
    with pytest.raises(ConfigError, match="^path: must be UTF-8"):
        KVSwapCache(llama, str(tmp_path / "\udcff"))
    assert llama.config._attn_implementation == "sdpa"


def test_budgets(llama, tmp_path, sessions):
    if sessions == "reference":
        pytest.skip("the reference keeps no ledger")
    with pytest.raises(
        BudgetError, match=r"kv_memory_bytes: must be at least \d+.*Lower max_context"
    ):
        KVSwapCache(llama, tmp_path, kv_memory_bytes="64KiB", max_context=64, max_batch=2)
    inputs = prompt(2, 40, padding=(0, 5))
    for arguments in ({}, {"max_context": 60, "max_batch": 2}, {"config": TIGHT}):
        budget = 3 << 20
        with KVSwapCache(llama, tmp_path, kv_memory_bytes=budget, **arguments) as cache:
            out = greedy(llama, inputs, cache)
            stats = cache.stats()
            assert stats.resident_bytes <= stats.resident_bytes_peak <= budget
            if "config" not in arguments:
                assert torch.equal(out, greedy(llama, inputs))
    cache = KVSwapCache(llama, tmp_path, max_context=20, max_batch=1)
    with cache, pytest.raises(KVSwapError, match="max_context"):
        greedy(llama, prompt(1, 30), cache)


def test_after_a_reset_settings_follow_the_next_text(llama, tmp_path, sessions):
    if sessions == "reference":
        pytest.skip("the reference keeps no ledger")
    with KVSwapCache(llama, tmp_path, kv_memory_bytes="1.5MiB") as cache:
        greedy(llama, prompt(1, 20), cache, tokens=2)
        cache.reset()
        long = prompt(2, 450)
        told = greedy(llama, long, cache, tokens=4)
        assert cache.stats().resident_bytes_peak <= 3 << 19
    with KVSwapCache(llama, tmp_path, kv_memory_bytes="1.5MiB") as cache:
        assert torch.equal(told, greedy(llama, long, cache, tokens=4))
