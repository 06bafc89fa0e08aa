"""A budget without `max_context` is divided anew as the text grows, and tokens stay right."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvswap_torch import BudgetError, KVSwapCache, SwapConfig
from kvswap_torch.errors import KVSwapError, StorageError
from kvswap_torch.hf import redivision
from kvswap_torch.hf.growth import ExplainedGrowth
from kvswap_torch.hf.settings import FirstPass
from tests.python.faulty_kernel import FaultyKernel, faulty_kernel
from tests.python.saved_conversation import goes_on
from tests.python.tiny_models import forward, greedy, has_native, least_named, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
FIRST, CHUNK = 900, 300
ASKED = SwapConfig(summary={"rank": 8}, selection={"top_k_groups": 60, "recent_tokens": 16})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", max_position_embeddings=16384)


def pieces(tokens: int) -> Iterator[tuple[int, int]]:
    yield 0, FIRST
    for begin in range(FIRST, tokens, CHUNK):
        yield begin, min(tokens, begin + CHUNK)


def read(model, cache, inputs: dict[str, torch.Tensor], begin: int = 0) -> None:
    """A prompt in pieces, from the token `begin` on."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for first, end in pieces(ids.shape[1]):
        if end > begin:
            begun = max(first, begin)
            forward(model, ids[:, begun:end], cache, attention_mask=mask[:, :end], logits_to_keep=1)


def decoded(model, cache, inputs: dict[str, torch.Tensor], steps: int = 8) -> torch.Tensor:
    """Logits of tokens that follow, whose passes choose: ``[batch, steps, vocabulary]``."""
    batch, held = inputs["input_ids"].shape
    mask, logits = inputs["attention_mask"], []
    for step in range(steps):
        mask = torch.cat([mask, mask.new_ones(batch, 1)], 1)
        token = prompt(batch, 1, seed=100 + step)["input_ids"]
        logits.append(forward(model, token, cache, attention_mask=mask))
    assert cache.get_seq_length() == held + steps
    return torch.cat(logits, 1)


def least(model, path: Path, tokens: int, batch: int = 1, config: Any = None) -> int:
    """The smallest budget for so many tokens, in bytes."""
    with pytest.raises(BudgetError) as error:
        KVSwapCache(model, path, config, 1, max_context=tokens, max_batch=batch)
    return least_named(error.value)


def selections(cache) -> list[Any]:
    session = cache.driver.session
    return [session.last_selection(layer) for layer in range(cache.driver.parts.shape.layers)]


# What it answers.


@pytest.mark.parametrize("padding", [(), (0, 37)], ids=["one", "padded"])
def test_it_goes_on_as_a_cache_that_was_opened_for_the_whole_text(model, tmp_path, padding):
    batch = len(padding) or 1
    inputs = prompt(batch, 4200, padding=padding)
    budget = least(model, tmp_path, 8192, batch) * 5 // 4
    with KVSwapCache(model, tmp_path, kv_memory_bytes=budget) as cache:
        read(model, cache, inputs)
        stats = cache.stats()
        assert stats.divided_anew >= 2 and stats.divided_for >= 4200
        assert stats.ledger["summary"] > 0, "something is chosen"
        answers = decoded(model, cache, inputs)
        chosen, config = selections(cache), cache.driver.config
        limits = {"max_context": stats.divided_for, "max_batch": batch}
        with KVSwapCache(model, tmp_path, kv_memory_bytes=budget, **limits) as whole:
            read(model, whole, inputs)
            assert whole.driver.config == config
            expected = decoded(model, whole, inputs)
            assert chosen == selections(whole)
            assert torch.allclose(answers, expected, atol=1e-5)
        assert cache.stats().resident_bytes_peak <= budget


@pytest.mark.parametrize("padding", [(), (0, 37)], ids=["one", "padded"])
def test_where_memory_covers_all_it_answers_as_a_cache_in_memory(model, tmp_path, padding):
    batch = len(padding) or 1
    inputs = prompt(batch, 3200, padding=padding)
    with KVSwapCache(model, tmp_path, kv_memory_bytes="16MiB") as cache:
        expected = greedy(model, inputs)
        assert torch.equal(greedy(model, inputs, cache, prefill_chunk_size=512), expected)
        stats = cache.stats()
        assert stats.divided_anew >= 1 and stats.divided_for >= 3200
        assert "memory divided anew" in str(stats)


def test_an_answer_may_outgrow_it_too(model, tmp_path):
    inputs = prompt(1, 100)
    with KVSwapCache(model, tmp_path, kv_memory_bytes="8MiB") as cache:
        assert torch.equal(
            greedy(model, inputs, cache, tokens=1100), greedy(model, inputs, tokens=1100)
        )
        assert cache.stats().divided_anew == 1
        assert cache.stats().decoded == 1099


@pytest.mark.parametrize("mode", ["off", "verify", "trust"])
def test_what_was_asked_for_stays_while_it_fits(model, tmp_path, mode):
    config = ASKED.with_settings({"prefetch.mode": mode, "selection.score": "logit_sum"})
    inputs = prompt(1, 4000)
    budget = least(model, tmp_path, 4100, config=config)
    with KVSwapCache(model, tmp_path, config, budget) as cache:
        read(model, cache, {name: each[:, :FIRST] for name, each in inputs.items()})
        first, guessed = cache.driver.config, cache.stats().divided_for
        read(model, cache, inputs, FIRST)
        stats = cache.stats()
        assert stats.divided_anew >= 1 and cache.driver.config != first
        assert stats.divided_for >= 4000 > guessed
        answers = decoded(model, cache, inputs)
        assert torch.isfinite(answers).all()
        assert cache.stats().resident_bytes_peak <= budget


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "int4"])
def test_records_stay_as_they_are(model, tmp_path, kv_dtype):
    config = SwapConfig(storage={"kv_dtype": kv_dtype}, selection={"group_tokens": 8})
    inputs = prompt(1, FIRST)
    budget = least(model, tmp_path, 8192, config=config) * 6 // 5
    with KVSwapCache(model, tmp_path, config, budget) as cache:
        read(model, cache, inputs)
        session = cache.driver.session
        before = [session.read_back(layer, 0, FIRST) for layer in range(3)]
        cache.driver.redivision.make_room(1, 8000)
        assert cache.stats().divided_anew == 1
        for layer, (keys, values) in enumerate(before):
            keys_now, values_now = session.read_back(layer, 0, FIRST)
            assert torch.equal(keys, keys_now) and torch.equal(values, values_now)
        assert torch.isfinite(decoded(model, cache, inputs)).all()


# Its life.


def grown(model, path: Path, tokens: int = 4200) -> tuple[KVSwapCache, dict[str, torch.Tensor]]:
    """One that was divided anew, and chooses."""
    inputs = prompt(1, tokens)
    cache = KVSwapCache(model, path, kv_memory_bytes=least(model, path, 8192) * 5 // 4)
    read(model, cache, inputs)
    assert cache.stats().divided_anew
    return cache, inputs


def test_it_can_be_forked_and_saved(model, tmp_path):
    cache, inputs = grown(model, tmp_path)
    with cache:
        cache.save(tmp_path / "saved")
        fork = cache.fork()
        asked = torch.cat([inputs["input_ids"], prompt(1, 1, seed=7)["input_ids"]], 1)
        with KVSwapCache.open(model, tmp_path / "saved", tmp_path) as opened:
            expected = goes_on(model, opened, asked)
        assert goes_on(model, fork, asked) == expected
        assert goes_on(model, cache, asked) == expected
        assert fork.stats().divided_for == cache.stats().divided_for
        longer = prompt(1, 7000)
        longer["input_ids"][:, :4200] = inputs["input_ids"]
        fork.crop(4200 - fork.get_seq_length())
        read(model, fork, longer, 4200)
        assert fork.stats().divided_anew >= 1
        fork.close()
        cache.crop(4200 - cache.get_seq_length())
        assert goes_on(model, cache, asked) == expected


def test_it_begins_anew_with_another_text(model, tmp_path):
    cache, _ = grown(model, tmp_path)
    with cache:
        cache.reset()
        forward(model, prompt(1, 200)["input_ids"], cache)
        assert cache.stats().divided_for == 200 + 1024 and cache.stats().divided_anew == 0
        cache.crop(-200)
        forward(model, prompt(1, 3000)["input_ids"], cache, logits_to_keep=1)
        assert cache.stats().divided_for == 4500 and cache.stats().divided_anew == 0


def test_it_says_so_once_each_time(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="kvswap_torch"):
        cache, _ = grown(model, tmp_path)
        with cache:
            lines = [line for line in caplog.messages if "divided anew" in line]
            assert len(lines) == cache.stats().divided_anew
    assert "max_context" in lines[0] and "memory.pages_per_layer" in lines[0]
    assert f"outgrown {FIRST + 1024:,}" in lines[0]


def test_counts_go_on(model, tmp_path):
    inputs = prompt(1, FIRST)
    with KVSwapCache(model, tmp_path, kv_memory_bytes=least(model, tmp_path, 8192) * 5 // 4) as one:
        read(model, one, inputs)
        decoded(model, one, inputs)
        before = one.stats()
        assert before.bytes_written > 0 and before.decoded == 8
        read(model, one, prompt(1, 3000), FIRST + 8)
        after = one.stats()
        assert after.divided_anew and after.decoded == 8
        assert after.bytes_written > 2 * before.bytes_written
        assert after.counters["steps"] == before.counters["steps"]
        assert after.bytes_read > before.bytes_read, "summaries were made again"


# What does not fit.


def test_a_text_that_no_division_fits_is_refused_and_the_cache_goes_on(model, tmp_path):
    inputs = prompt(1, 8000)
    budget = least(model, tmp_path, 4000)
    with KVSwapCache(model, tmp_path, kv_memory_bytes=budget) as cache:
        with pytest.raises(BudgetError) as error:
            read(model, cache, inputs)
        held = cache.get_seq_length()
        assert 3600 < held <= 4000
        message = str(error.value)
        assert least_named(error.value) > budget and ". " not in message
        assert f"the {held:,} tokens that the cache holds stay as they are" in message
        ids = inputs["input_ids"]
        forward(model, ids[:, held : held + 1], cache)
        cache.crop(-201)
        forward(model, ids[:, held - 200 : held], cache, logits_to_keep=1)
        assert cache.get_seq_length() == held
        assert cache.stats().resident_bytes_peak <= budget


def test_with_a_policy_that_retains_tokens_the_error_names_max_context(model, tmp_path):
    with pytest.raises(BudgetError, match=r"with max_context=\d+ or more"):
        config = SwapConfig.preset("h2o")
        budget = least(model, tmp_path, 2000, config=config)
        with KVSwapCache(model, tmp_path, config, budget) as cache:
            read(model, cache, prompt(1, 8000))


def one_by_one(model, cache, tokens: int) -> None:
    for step in range(tokens):
        forward(model, prompt(1, 1, seed=step)["input_ids"], cache, logits_to_keep=1)


@pytest.mark.filterwarnings("ignore:.*the model was made for:RuntimeWarning")
def test_past_the_models_length_a_division_lasts(tmp_path):
    short = tiny_model("llama", max_position_embeddings=1024)
    with KVSwapCache(short, tmp_path, kv_memory_bytes="16MiB") as cache:
        for tokens in (FIRST, 1000):
            forward(short, prompt(1, tokens)["input_ids"], cache, logits_to_keep=1)
        one_by_one(short, cache, 300)
        assert cache.get_seq_length() == FIRST + 1300
        assert cache.stats().divided_anew == 1
        assert cache.stats().divided_for > FIRST + 1300


def test_near_the_end_of_its_memory_it_is_divided_once(model, tmp_path):
    budget = least(model, tmp_path, 2600) + 12000
    with KVSwapCache(model, tmp_path, kv_memory_bytes=budget) as cache:
        for tokens in (FIRST, 2000):
            forward(model, prompt(1, tokens)["input_ids"], cache, logits_to_keep=1)
        with pytest.raises(BudgetError, match="answer from them, crop"):
            one_by_one(model, cache, 1000)
        held = cache.get_seq_length()
        assert cache.stats().divided_anew <= 2 and held > FIRST + 2000
        cache.crop(-10)
        one_by_one(model, cache, 10)
        assert cache.get_seq_length() == held
        assert cache.stats().resident_bytes_peak <= budget


def test_a_text_is_divided_so_many_times_at_most(model, tmp_path, monkeypatch):
    monkeypatch.setattr(redivision, "DIVISIONS_MAX", 1, raising=False)
    with KVSwapCache(model, tmp_path, kv_memory_bytes=least(model, tmp_path, 8192) * 5 // 4) as one:
        inputs = prompt(1, 7000)
        with pytest.raises(BudgetError, match="at most 1 times.*stay as they are"):
            read(model, one, inputs)
        held, stats = one.get_seq_length(), one.stats()
        assert stats.divided_anew == 1 and held >= stats.divided_for - CHUNK
        with one.fork() as fork, pytest.raises(BudgetError, match="at most 1 times"):
            read(model, fork, inputs, held)
        one.crop(-10)
        read(model, one, {name: each[:, :held] for name, each in inputs.items()}, held - 10)


def outgrowing(cache) -> torch.Tensor:
    return prompt(1, cache.stats().divided_for + 1)["input_ids"]


def test_a_fork_that_was_emptied_keeps_its_division(model, tmp_path):
    inputs = prompt(1, 2200)
    budget = least(model, tmp_path, 8192) * 5 // 4
    with KVSwapCache(model, tmp_path, kv_memory_bytes=budget) as cache:
        read(model, cache, {name: each[:, :FIRST] for name, each in inputs.items()})
        with cache.fork() as fork:
            read(model, fork, inputs, FIRST)
            assert fork.stats().divided_anew == 1
            config, ranks = fork.driver.config, fork.driver.ranks
            assert config != cache.driver.config
            ids = outgrowing(fork)
            fork.crop(-2200)
            forward(model, ids, fork, logits_to_keep=1)
            assert fork.driver.config == config and fork.driver.ranks == ranks
            assert fork.stats().divided_for is None and fork.stats().divided_anew == 0
            assert torch.isfinite(
                decoded(model, fork, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            ).all()


def test_a_text_after_another_has_no_projections_yet(model, tmp_path):
    cache, _ = grown(model, tmp_path)
    with cache:
        assert cache.driver.estimates.kinds
        cache.crop(-cache.get_seq_length())
        cache.driver._open_for(FirstPass(1, 3000))
        assert not cache.driver.estimates.kinds, "a rank is chosen as if there were none"


@pytest.mark.parametrize("fits", [True, False], ids=["the same settings", "none fit"])
def test_what_predictors_give_up_is_the_sessions(model, tmp_path, monkeypatch, fits):
    config = ASKED.with_settings({"prefetch.mode": "verify", "selection.score": "logit_sum"})
    with KVSwapCache(model, tmp_path, config, "1MiB") as cache:
        read(model, cache, prompt(1, FIRST))
        driver, before = cache.driver, cache.driver.session.ledger()["limit"]
        taken = driver.need.beside(driver.config, 1, 1)["predictor"]
        assert taken > 0

        def search(settled):
            driver._predictor.take_apart()
            if not fits:
                raise BudgetError("kv_memory_bytes: must be at least 1 more")
            return driver.config, 3000

        monkeypatch.setattr(driver.need, "search", search)
        driver.redivision.make_room(1, FIRST + 10)
        assert driver.session.ledger()["limit"] == before + taken
        assert cache.stats().divided_anew == 1
        decoded(model, cache, prompt(1, FIRST))


def test_what_the_session_refuses_names_what_it_is_divided_for(model, tmp_path):
    cache, _ = grown(model, tmp_path)
    with cache:
        context = cache.stats().divided_for
        with (
            pytest.raises(BudgetError, match=f"chosen for {context:,} tokens"),
            ExplainedGrowth(cache.driver, 0, 10),
        ):
            raise BudgetError("kv_memory_bytes: must be larger")


# Faults.


@pytest.fixture
def disk() -> Iterator[FaultyKernel]:
    with faulty_kernel() as kernel:
        yield kernel


@pytest.mark.parametrize("call", ["read", "write", "allocate"])
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for ever"])
def test_a_fault_loses_nothing(model, tmp_path, disk, call, lasts):
    """Wherever it strikes: an error with its cause or none, then the same pass and its tokens."""
    inputs = prompt(1, 2200)
    head = {name: each[:, :1900] for name, each in inputs.items()}
    budget = least(model, tmp_path, 8192) * 5 // 4
    disk.heal()
    with KVSwapCache(model, tmp_path, kv_memory_bytes=budget) as cache:
        read(model, cache, head)
        read(model, cache, inputs, 1900)
        assert cache.stats().divided_anew == 1
        expected = decoded(model, cache, inputs)
    failures = 0
    for nth in (1, 2, 5, 20, 150):
        disk.heal()
        with KVSwapCache(model, tmp_path, kv_memory_bytes=budget) as cache:
            read(model, cache, head)
            assert cache.stats().divided_anew == 0
            disk.arm(call, nth=nth, lasts=lasts)
            try:
                read(model, cache, inputs, 1900)
            except KVSwapError as error:
                assert isinstance(error, StorageError) and error.errno == errno.EIO
                failures += 1
            struck = disk.injected
            disk.heal()
            read(model, cache, inputs, cache.get_seq_length())
            assert cache.stats().divided_anew == 1
            assert torch.equal(decoded(model, cache, inputs), expected)
        if not struck:
            break
    assert failures > 0 or not lasts


@contextlib.contextmanager
def on_a_disk_that_fails(model, path, disk) -> Iterator[tuple[KVSwapCache, dict[str, Any]]]:
    """A cache that holds 1,900 of 2,200 tokens, no read of which succeeds until the disk heals."""
    inputs = prompt(1, 2200)
    disk.heal()
    with KVSwapCache(model, path, kv_memory_bytes=least(model, path, 8192) * 5 // 4) as one:
        read(model, one, {name: each[:, :1900] for name, each in inputs.items()})
        disk.arm("read", lasts=True, name="")
        yield one, inputs


def test_while_the_disk_fails_each_use_says_so(model, tmp_path, disk):
    with on_a_disk_that_fails(model, tmp_path, disk) as (one, inputs):
        for _ in range(3):
            with pytest.raises(StorageError):
                read(model, one, inputs, 1900)
            assert one.stats().divided_anew == 0, "all was read before the old division went"
        disk.heal()
        assert one.get_seq_length() == 1900
        read(model, one, inputs, 1900)
        assert torch.isfinite(decoded(model, one, inputs)).all()


def test_a_record_that_cannot_be_read_ends_no_cache(model, tmp_path, disk):
    with on_a_disk_that_fails(model, tmp_path, disk) as (one, inputs):
        with pytest.raises(StorageError):
            read(model, one, inputs, 1900)
        one.reset()
        disk.heal()
        read(model, one, inputs)
        assert torch.isfinite(decoded(model, one, inputs)).all()


def test_a_limit_on_the_disk_is_one_of_all_that_is_written(model, tmp_path):
    """A division begins another file, whose limit would be as large again."""
    budget = least(model, tmp_path, 8192) * 5 // 4
    config = dataclasses.replace(
        ASKED, storage=dataclasses.replace(ASKED.storage, max_disk_bytes=1 << 30)
    )
    inputs = prompt(1, 12000)
    with KVSwapCache(model, tmp_path, config, kv_memory_bytes=budget) as cache:
        with pytest.raises(BudgetError, match="max_context"):
            read(model, cache, inputs)
        assert cache.stats().divided_anew == 0
