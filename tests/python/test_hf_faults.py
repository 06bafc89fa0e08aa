"""Faults under a model's cache: one clear error, then the same pass again and the right tokens."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.errors import ClosedError, KVSwapError, StorageError
from tests.python.faulty_conversation import at_every_call, converse, persistently
from tests.python.faulty_kernel import FaultyKernel, faulty_kernel
from tests.python.tiny_models import COVERING, SMALL, has_native, tiny_model, tokens_of

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]

READERS = ("uring", "threads", "sync")
REPEATS = int(os.environ.get("KVSWAP_TEST_REPEATS", "100"))  # random moments


@pytest.fixture
def disk() -> Iterator[FaultyKernel]:
    with faulty_kernel() as kernel:
        yield kernel


def open_small(model: Any, folder: Path, reader: str) -> KVSwapCache:
    """Few pages: steps choose, and read what they chose before."""
    config = SwapConfig(groups_max=12, pages_max=14, reader=reader, **SMALL)
    return KVSwapCache(model, path=folder, config=config)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("call", ["read", "write", "allocate"])
def test_the_nth_call_fails_and_the_pass_is_repeated(
    reader: str, batch: int, call: str, disk: FaultyKernel, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    failures: list[str] = []

    def opened() -> KVSwapCache:
        return open_small(model, tmp_path, reader)

    def live(cache: KVSwapCache) -> list[torch.Tensor]:
        return converse(model, cache, batch, lambda step: persistently(step, disk, failures))

    disk.heal()
    with opened() as cache:
        undisturbed = live(cache)
    at_every_call(disk, call, opened, live, undisturbed)
    assert failures


@pytest.fixture
def calls_are_repeated(disk: FaultyKernel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What generate() does to the model and the cache is done again after a fault; the faults."""
    failures: list[str] = []

    def repeat(owner: type, name: str) -> None:
        usual = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            return persistently(lambda: usual(*arguments, **named), disk, failures)

        monkeypatch.setattr(owner, name, call)

    repeat(type(tiny_model("llama")), "__call__")
    for name in ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        repeat(KVSwapCache, name)
    return failures


@pytest.mark.parametrize(
    "way",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}],
    ids=["beams", "assisted"],
)
@pytest.mark.parametrize("call", ["read", "write", "allocate"])
def test_the_nth_call_under_generate_fails_and_its_pass_is_repeated(
    way: dict, call: str, disk: FaultyKernel, calls_are_repeated: list[str], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    # What assisted decoding looks up, it finds here.
    prompt = torch.cat([tokens_of(1, 12)] * 3, 1)
    options = {"max_new_tokens": 10, "do_sample": False} | way

    def opened() -> KVSwapCache:
        return open_small(model, tmp_path, "uring")

    def live(cache: KVSwapCache) -> list[torch.Tensor]:
        return [model.generate(prompt, past_key_values=cache, **options)]

    disk.heal()
    with opened() as cache:
        undisturbed = live(cache)
    at_every_call(disk, call, opened, live, undisturbed)
    assert calls_are_repeated


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_fails_and_the_cache_goes_on(
    family: str, disk: FaultyKernel, tmp_path: Path
) -> None:
    model = tiny_model(family)
    prompt = tokens_of(1, 30)
    options = {"max_new_tokens": 8, "do_sample": False}
    for extra in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}):
        if family == "gemma3" and "prompt_lookup_num_tokens" in extra:
            continue
        with open_small(model, tmp_path, "uring") as cache:
            disk.heal()
            undisturbed = model.generate(prompt, past_key_values=cache, **options, **extra)
        for call, nth in (("read", 1), ("read", 9), ("write", 1), ("write", 4), ("allocate", 1)):
            with open_small(model, tmp_path, "uring") as cache:
                disk.arm(call, nth=nth, lasts=True, error=errno.EIO)
                try:
                    told = model.generate(prompt, past_key_values=cache, **options, **extra)
                except StorageError:
                    disk.heal()
                    cache.reset()
                    told = model.generate(prompt, past_key_values=cache, **options, **extra)
                disk.heal()
                assert torch.equal(told, undisturbed), (family, extra, call, nth)


def test_a_crop_that_fails_has_changed_no_layer_or_is_to_be_ended(
    disk: FaultyKernel, tmp_path: Path
) -> None:
    """What returns is read twice: only a disk that fails the second time leaves it unfinished."""
    model = tiny_model("llama")
    lengths, unfinished = [], 0
    with open_small(model, tmp_path, "sync") as cache, torch.no_grad():
        disk.heal()
        for nth in range(1, 17):
            cache.reset()
            model(tokens_of(1, 14), past_key_values=cache)
            disk.arm("read", nth=nth, lasts=True, error=errno.ENODEV)
            try:
                cache.crop(-3)
            except StorageError:
                layers = range(model.config.num_hidden_layers)
                lengths.append({cache.get_seq_length(layer) for layer in layers})
                assert cache.get_seq_length() == 14
                disk.heal()
                told = try_a_pass(model, cache)
                if told is not None:
                    assert "must first be cropped to 11 positions" in told
                    with pytest.raises(ValueError, match="must be at most 11, .* got 12"):
                        cache.crop(-2)
                    unfinished += 1
                cache.crop(-3)
            disk.heal()
            assert cache.get_seq_length() == 11
            told = model(tokens_of(1, 2), past_key_values=cache).logits
            cache.reset()
            model(tokens_of(1, 14)[:, :11], past_key_values=cache)
            expected = model(tokens_of(1, 2), past_key_values=cache).logits
            torch.testing.assert_close(told, expected)
    assert {11, 14} in lengths
    assert len(lengths) > unfinished > lengths.count({11, 14}), "before a layer was cropped, too"


def try_a_pass(model, cache) -> str | None:
    """A pass and back again, or why it is refused."""
    try:
        model(tokens_of(1, 2), past_key_values=cache)
    except StorageError as error:
        return str(error)
    cache.crop(-2)
    return None


@pytest.mark.parametrize("reader", ["uring", "threads"])
def test_a_disk_that_hangs_is_told_and_waited_for_again(
    reader: str, disk: FaultyKernel, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    settings = {"groups_max": 12, "pages_max": 14, "reader": reader, "io_timeout_seconds": 1}
    config = SwapConfig(**settings, **SMALL)
    with KVSwapCache(model, path=tmp_path, config=config) as cache:
        disk.heal()
        undisturbed = converse(model, cache, 1, lambda step: step())
    late: list[str] = []

    def patiently(step: Callable[[], Any]) -> Any:
        for _ in range(10):
            try:
                return step()
            except StorageError as error:
                assert error.errno == errno.ETIMEDOUT
                assert "io_timeout_seconds" in str(error)
                late.append(str(error))
                disk.heal()
        raise AssertionError(late)

    with KVSwapCache(model, path=tmp_path, config=config) as cache:
        disk.arm("read", nth=5, delay_us=1_700_000)
        told = converse(model, cache, 1, patiently)
        assert late
        assert all(map(torch.equal, told, undisturbed))


def test_a_window_that_has_moved_on_comes_back(disk: FaultyKernel, tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    with open_small(model, tmp_path, "sync") as cache, torch.no_grad():
        disk.heal()
        model(tokens_of(1, 40), past_key_values=cache)
        with cache.fork() as undisturbed:
            expected = model(tokens_of(1, 20), past_key_values=undisturbed).logits
        disk.arm("read", lasts=True)
        with pytest.raises(StorageError):
            model(tokens_of(1, 20), past_key_values=cache)
        disk.heal()
        assert cache.get_seq_length() == 40
        assert torch.equal(model(tokens_of(1, 20), past_key_values=cache).logits, expected)


def test_a_pass_that_fails_outside_of_the_cache_is_taken_back(tmp_path: Path) -> None:
    """After the last layer, too: the tokens were never told."""
    model = tiny_model("llama")
    with open_small(model, tmp_path, "auto") as cache, torch.no_grad():
        model(tokens_of(1, 25), past_key_values=cache)
        for module in (model.model.layers[1], model.model.layers[2].mlp, model.lm_head):

            def fail(*_: Any) -> None:
                raise MemoryError("elsewhere")

            handle = module.register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                model(tokens_of(1, 7), past_key_values=cache)
            handle.remove()
            assert cache.get_seq_length() == 25
            assert {cache.get_seq_length(i) for i in range(3)} == {25}


def test_ctrl_c_at_random_moments(tmp_path: Path) -> None:
    model = tiny_model("llama")
    attention = model.config._attn_implementation
    chooser = random.Random(3)
    with open_small(model, tmp_path, "uring") as cache:
        undisturbed = converse(model, cache, 1, lambda step: step())
    began = time.perf_counter()
    with open_small(model, tmp_path, "uring") as cache:
        converse(model, cache, 1, lambda step: step())
    whole = time.perf_counter() - began
    within = between = 0

    def again(step: Callable[[], Any]) -> Any:
        nonlocal within
        before = cache.get_seq_length()
        try:
            return step()
        except KeyboardInterrupt:
            within += 1
        # It may have come when the cache was through and the caller was not.
        after = cache.get_seq_length()
        if after < before:
            return None  # cropped
        if after > before:
            cache.crop(before - after)
        return step()

    main = threading.get_ident()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(REPEATS):
            press = threading.Timer(
                chooser.uniform(1e-4, whole), signal.pthread_kill, (main, signal.SIGINT)
            )
            try:
                with open_small(model, tmp_path, "uring") as cache:
                    press.start()
                    told = converse(model, cache, 1, again)
                    press.cancel()
                    press.join()
                assert all(map(torch.equal, told, undisturbed))
            except KeyboardInterrupt:
                between += 1  # no step was under way
                press.join()
            assert model.config._attn_implementation == attention
    finally:
        signal.signal(signal.SIGINT, usual)
    assert within > 0, between
    assert not list(tmp_path.iterdir())


def test_closing_while_another_thread_generates(tmp_path: Path) -> None:
    model = tiny_model("llama")
    chooser = random.Random(4)
    prompt = tokens_of(1, 30)
    ends: set[str] = set()
    for _ in range(2 * REPEATS):
        with KVSwapCache(model, path=tmp_path, config=COVERING) as cache:

            def generate(cache: KVSwapCache = cache) -> None:
                try:
                    model.generate(
                        prompt, past_key_values=cache, max_new_tokens=40, do_sample=False
                    )
                    ends.add("whole")
                except ClosedError:
                    ends.add("closed")
                except BaseException as error:
                    ends.add(f"{type(error).__name__}: {error}")

            thread = threading.Thread(target=generate)
            thread.start()
            time.sleep(chooser.uniform(0, 0.05))
        thread.join()
    assert ends <= {"closed", "whole"}
    assert "closed" in ends


def test_four_threads_in_one_session(tmp_path: Path) -> None:
    cache = KVSwapCache(tiny_model("llama"), path=tmp_path, config=COVERING)
    session = cache.driver.session
    raised: list[BaseException] = []
    keys = torch.randn(1, 2, 24, 16)

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        for _ in range(REPEATS):
            try:
                chooser.choice(
                    [
                        lambda: session.append(0, keys, keys),
                        lambda: session.crop(3),
                        session.reset,
                        session.counters,
                    ]
                )()
            except BaseException as error:
                raised.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(type(error) is KVSwapError for error in raised), set(map(repr, raised))
    cache.close()
    with pytest.raises(ClosedError):
        session.batch()
