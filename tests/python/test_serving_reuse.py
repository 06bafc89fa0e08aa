"""Prompts go on from the cache that has read most of them, and the store keeps its limit."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import KVSwapCache
from kvswap_torch.errors import StorageError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.line import Turn
from kvswap_torch.hf.serving.reuse import CacheOptions, GoneError, PrefixReuse
from kvswap_torch.hf.serving.store import CacheStore
from tests.python.tiny_models import COVERING, VOCABULARY, greedy, has_native, tiny_model

if has_native():
    from kvswap_torch import _C
pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
ANSWER = 6


def text(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def asked(document: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.cat([document, text(9, 1000 + seed)], dim=1)


class Desk:
    """What a server has, without the server."""

    def __init__(self, model: Any, folder: Path, limit: int = 1 << 30, **options: Any):
        self.model, self.counts = model, Counts()
        self.store = CacheStore(folder, limit, model_parts(model), self.counts)
        self.options = replace(CacheOptions(path=folder, config=COVERING, save_from=32), **options)
        self.reuse = PrefixReuse(model, self.store, self.options, self.counts)
        self.cached = 0

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *error: object) -> None:
        self.reuse.close()

    def ask(self, ids: torch.Tensor, **arguments: Any) -> list[int]:
        turn = Turn()
        given = {"do_sample": False, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER}
        mask = torch.ones_like(ids)
        out = self.reuse.generate(turn, input_ids=ids, attention_mask=mask, **(given | arguments))
        self.reuse.settle()
        self.cached = turn.cached_tokens
        return out[0, ids.shape[1] :].tolist()


def in_memory(model: Any, ids: torch.Tensor) -> list[int]:
    out = greedy(model, {"input_ids": ids}, DynamicCache(config=model.config), tokens=ANSWER)
    return out[0, ids.shape[1] :].tolist()


def test_each_prompt_goes_on_from_the_longest_prefix(tmp_path: Path) -> None:
    model = tiny_model("llama")
    books = [text(60, 1), torch.cat([text(60, 1)[:, :50], text(40, 2)], 1), text(70, 3)]
    with Desk(model, tmp_path) as desk:
        for book, cached in zip(books, (0, 50, 0), strict=True):
            prompt = asked(book, 1)
            assert desk.ask(prompt) == in_memory(model, prompt)
            assert desk.cached == cached
        assert len(desk.store.entries()) == 3
        for book in books:
            prompt = asked(book, 2)
            assert desk.ask(prompt) == in_memory(model, prompt)
            assert desk.cached == book.shape[1]
            prompt = asked(book, 2)
            assert desk.ask(prompt) == in_memory(model, prompt)
            assert desk.cached == prompt.shape[1] - 1, "the same one: all but its last token"
        assert len(desk.store.entries()) == 3, "a short question is not worth another one"
    with Desk(model, tmp_path) as desk:  # the same server again
        prompt = asked(books[1], 3)
        assert desk.ask(prompt) == in_memory(model, prompt)
        assert desk.cached == books[1].shape[1]
        assert desk.counts["hits"] == 1 and desk.counts["misses"] == 0


def test_a_conversation_goes_on_from_its_own_answers(tmp_path: Path) -> None:
    model = tiny_model("gemma3")  # whose sliding layers cannot go back
    with Desk(model, tmp_path, save_from=10_000) as desk:
        prompt, read = text(40, 1), 0
        for turn in range(3):
            answer = desk.ask(prompt)
            assert answer == in_memory(model, prompt)
            assert desk.cached == read
            read = prompt.shape[1] + ANSWER - 1
            prompt = torch.cat([prompt, torch.tensor([answer]), text(5, turn)], dim=1)
        other = asked(prompt[:, :30], 4)
        assert desk.ask(other) == in_memory(model, other)
        assert desk.cached == 0
    assert list(tmp_path.iterdir()) == []


def test_a_few_common_words_are_no_prefix(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with Desk(model, tmp_path) as desk:
        one = asked(text(60, 1), 1)
        other = torch.cat([one[:, :20], text(50, 2)], dim=1)
        desk.ask(one)
        desk.ask(other)
        assert desk.cached == 0


def test_the_limit_is_held_and_the_oldest_leave(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with Desk(model, tmp_path) as desk:
        desk.ask(text(60, 0))
        limit = 8 * desk.store.bytes
    with (
        Desk(model, tmp_path, limit) as desk,
        KVSwapCache.open(model, desk.store.entries()[0].path, path=tmp_path),
    ):  # in use: it stays, though it is the oldest
        for seed in range(1, 10):
            desk.ask(text(60, seed))
            taken = sum(512 * f.stat().st_blocks for f in tmp_path.glob("*/*"))
            assert taken == desk.store.bytes <= limit
        assert desk.counts["evictions"] >= 2
        kept = []
        for seed in range(10):
            desk.ask(asked(text(60, seed), 1), max_new_tokens=1, min_new_tokens=1)
            kept += [seed] if desk.cached else []
        assert 0 in kept and 1 not in kept


def test_damaged_and_foreign_caches_are_left_out_and_stay(tmp_path: Path, caplog: Any) -> None:
    model, other = tiny_model("llama"), tiny_model("qwen3")
    with Desk(model, tmp_path) as desk, Desk(other, tmp_path) as foreign:
        for seed in (1, 2, 3):
            desk.ask(text(60, seed))
        foreign.ask(text(60, 4))
        ours = {bytes(e.tokens[:60].tolist()): e.path for e in desk.store.entries()}
    by_seed = {seed: ours[bytes(text(60, seed)[0].tolist())] for seed in (1, 2, 3)}
    state, records = by_seed[1] / "state.safetensors", by_seed[2] / "records.bin"
    os.truncate(state, state.stat().st_size - 1)
    records.write_bytes(bytes(records.stat().st_size))
    names = {path.name for path in tmp_path.iterdir()}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvswap_torch"), Desk(model, tmp_path) as desk:
        for _ in range(2):
            for seed in (1, 2, 3):
                prompt = asked(text(60, seed), 1)
                assert desk.ask(prompt) == in_memory(model, prompt)
        assert desk.counts["store_unusable"] == 3
    for path in (by_seed[1], by_seed[2]):
        assert sum(str(path) in record.getMessage() for record in caplog.records) == 1
        assert path.exists()
    assert names < {path.name for path in tmp_path.iterdir()}, "none has left, two were made anew"


def test_other_weights_of_the_same_shape_find_nothing(tmp_path: Path) -> None:
    with Desk(tiny_model("llama"), tmp_path) as desk:
        desk.ask(text(60, 1))
    model = tiny_model("llama", seed=1)
    with Desk(model, tmp_path) as desk:
        assert desk.ask(text(60, 1)) == in_memory(model, text(60, 1))
        assert desk.cached == 0 and desk.counts["store_unusable"] == 1


def test_a_client_that_hangs_up_in_prefill_leaves_a_cache_that_goes_on(tmp_path: Path) -> None:
    model = tiny_model("llama")
    prompt = text(200, 1)
    with Desk(model, tmp_path, prefill_chunk=50) as desk:
        turn, passes = Turn(), []

        def count(*_: Any) -> None:
            passes.append(1)
            if len(passes) == 2:
                turn.gone.set()

        hook = model.model.register_forward_hook(count)
        with pytest.raises(GoneError):
            desk.reuse.generate(turn, input_ids=prompt, max_new_tokens=ANSWER)
        hook.remove()
        desk.reuse.settle()
        assert desk.ask(prompt) == in_memory(model, prompt)
        assert desk.cached == 100
    with Desk(model, tmp_path) as desk:
        desk.ask(prompt)
        assert desk.cached == 199


def test_a_client_that_hangs_up_in_the_answer(tmp_path: Path) -> None:
    model = tiny_model("llama")
    prompt = text(60, 1)

    class Streamer:
        """As the server's own: raises between passes."""

        puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts += 1
            if self.puts == 4:
                raise ConnectionAbortedError

    with Desk(model, tmp_path) as desk:
        with pytest.raises(ConnectionAbortedError):
            desk.ask(prompt, streamer=Streamer())
        desk.reuse.settle()
        assert desk.ask(prompt) == in_memory(model, prompt)
        assert desk.cached == 59


def test_a_store_that_takes_nothing_does_not_hinder(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    with Desk(model, tmp_path, limit=1000) as desk:
        for seed in (1, 1, 2):
            desk.ask(text(60, seed))
        assert desk.counts["save_failures"] == 3
    assert list(tmp_path.iterdir()) == []

    def full(*_: Any) -> None:
        raise StorageError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(KVSwapCache, "save", full)
    with caplog.at_level(logging.WARNING, "kvswap_torch"), Desk(model, tmp_path) as desk:
        for seed in (1, 2):
            assert desk.ask(text(60, seed)) == in_memory(model, text(60, seed))
        assert desk.counts["save_failures"] == 2
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_has_left_is_removed_and_documents_may_be_added(
    tmp_path: Path,
) -> None:
    model = tiny_model("llama")
    left = tmp_path / (".book.kvswap." + "a" * 16)
    left.mkdir()
    (left / "records.bin").write_bytes(b"half")
    with Desk(model, tmp_path) as desk:
        assert not left.exists()
        with KVSwapCache(model, path=tmp_path, config=COVERING) as cache:
            greedy(model, {"input_ids": text(60, 5)}, cache, tokens=1)
            cache.save(tmp_path / "book.kvswap")
        desk.ask(asked(text(60, 5), 1))
        assert desk.cached == 60
        desk.reuse.close()
        _C.SavedCache.remove(str(tmp_path / "book.kvswap"))
        desk.ask(asked(text(60, 5), 2))
        assert desk.cached == 0


@pytest.mark.parametrize("why", ["gone", "ending"])
def test_a_pass_that_nobody_waits_for_ends_before_its_next_layer(tmp_path: Path, why: str) -> None:
    model = tiny_model("llama")
    book, begun = text(60, 1), []
    with Desk(model, tmp_path, save_from=10_000) as desk:
        desk.ask(book)
        turn = Turn()
        first, second = model.model.layers[:2]
        hooks = [
            first.register_forward_hook(lambda *call: getattr(turn, why).set()),
            second.register_forward_hook(lambda *call: begun.append(call)),
        ]
        given = {"input_ids": asked(book, 2), "do_sample": False, "max_new_tokens": ANSWER}
        with pytest.raises(GoneError):
            desk.reuse.generate(turn, **given)
        for hook in hooks:
            hook.remove()
        assert begun == []
        desk.reuse.settle()
        assert desk.ask(asked(book, 2)) == in_memory(model, asked(book, 2))
        assert desk.cached == book.shape[1], "what was read before is still there"
