"""Forks answer as what they are forks of, and what they share is in one account."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvswap_torch import KVSwapCache
from tests.python.saved_conversation import filled, goes_on
from tests.python.tiny_models import TIGHT, forward, greedy, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
TOKENS = 300
BUDGET = 2 << 20


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def counted(cache: KVSwapCache) -> tuple[int, int]:
    """Of the summary: what this cache counts, and what another does."""
    stats = cache.stats()
    assert stats.resident_bytes == sum(stats.ledger.values())
    assert stats.resident_bytes + stats.shared_bytes <= stats.resident_bytes_peak <= BUDGET
    return stats.ledger["summary"], stats.shared_bytes


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_who_is_left_counts_what_is_shared_and_answers_as_before(
    order: tuple[int, ...], model, tmp_path: Path
) -> None:
    cache = KVSwapCache(model, tmp_path, TIGHT, kv_memory_bytes=BUDGET)
    out = greedy(model, prompt(1, TOKENS), cache, tokens=4)
    cache.save(tmp_path / "a")
    fork = cache.fork()
    caches = [cache, fork, fork.fork()]
    with KVSwapCache.open(model, tmp_path / "a", tmp_path, BUDGET) as opened:
        whole, shared = counted(opened)
        assert whole > 0 and shared == 0
        expected = goes_on(model, opened, out)
    left = [0, 1, 2]
    for number in order:
        for each in left:
            assert counted(caches[each]) == ((whole, 0) if each == left[0] else (0, whole))
        caches[number].close()
        left.remove(number)
    # Again, while each goes its own way before it is closed.
    with KVSwapCache.open(model, tmp_path / "a", tmp_path, BUDGET) as opened:
        fork = opened.fork()
        caches = [opened, fork, fork.fork()]
        for number in order:
            assert goes_on(model, caches[number], out) == expected
            counted(caches[number])
            caches[number].close()


def crops(model, cache: KVSwapCache) -> torch.Tensor:
    cache.crop(-TOKENS // 2)
    return forward(model, prompt(1, 3, seed=3)["input_ids"], cache)


def reads_more(model, cache: KVSwapCache) -> torch.Tensor:
    return forward(model, prompt(1, 60, seed=3)["input_ids"], cache)


def branches(model, cache: KVSwapCache) -> torch.Tensor:
    cache.batch_repeat_interleave(3)
    ids = prompt(3, 9, seed=3)["input_ids"]
    first = forward(model, ids[:, :6], cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    return torch.cat([first[:2], forward(model, ids[:2, 6:], cache)], dim=1)


@pytest.mark.parametrize("edit", [crops, reads_more, branches])
@pytest.mark.parametrize("fork_first", [True, False])
def test_an_edit_of_one_is_not_the_others(
    edit: Callable, fork_first: bool, model, tmp_path: Path
) -> None:
    cache, out = filled(model, tmp_path, tokens=TOKENS)
    cache.save(tmp_path / "a")
    fork = cache.fork()
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        plain = goes_on(model, opened, out)
    with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as opened:
        edited = edit(model, opened)
    one, other = (fork, cache) if fork_first else (cache, fork)
    with other:
        with one:
            assert torch.equal(edit(model, one), edited)
            assert goes_on(model, other, out) == plain
            other.crop(out.shape[1] - 1 - other.get_seq_length())
            with other.fork() as again:
                assert torch.equal(edit(model, again), edited)
        with other.fork() as last:
            assert goes_on(model, last, out) == plain
