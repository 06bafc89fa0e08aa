"""Several threads run one model: with plain caches, a disk cache each, and one cache by mistake."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvswap_torch import KVSwapCache, KVSwapError
from kvswap_torch.errors import ClosedError
from tests.python.tiny_models import COVERING, TIGHT, ctrl_c, forward, greedy, prompt, tiny_model

pytestmark = pytest.mark.parametrize("sessions", ["native", "host device"], indirect=True)

INPUTS = {
    "padded": prompt(2, 24, padding=(0, 7)),
    "plain": prompt(1, 19, seed=5),
}


@pytest.fixture(params=[None, 1e-6], ids=["usual switching", "constant switching"])
def switching(request: pytest.FixtureRequest):
    usual = sys.getswitchinterval()
    sys.setswitchinterval(request.param or usual)
    yield
    sys.setswitchinterval(usual)


def at_once(*works: Callable[[], None]) -> None:
    """Runs each in a thread of its own, all starting together; raises what one of them raised."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        work()

    with ThreadPoolExecutor(len(works)) as threads:
        for result in [threads.submit(run, work) for work in works]:
            result.result()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.pairs
def test_plain_caches_while_disk_caches_come_and_go(family, switching, open_cache):
    model = tiny_model(family)
    expected = {name: greedy(model, inputs, tokens=40) for name, inputs in INPUTS.items()}
    short = {name: greedy(model, inputs, tokens=3) for name, inputs in INPUTS.items()}

    def with_plain_caches():
        for _ in range(3):
            for name, inputs in INPUTS.items():
                assert torch.equal(greedy(model, inputs, tokens=40), expected[name]), name

    def with_disk_caches():
        for number in range(20):
            name = ("padded", "plain")[number % 2]
            cache = open_cache(model)
            assert torch.equal(greedy(model, INPUTS[name], cache, tokens=3), short[name]), name
            cache.close()

    at_once(with_plain_caches, with_disk_caches)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("config", [COVERING, TIGHT], ids=["covering", "tight"])
@pytest.mark.pairs
def test_three_threads_with_a_disk_cache_each(config, switching, llama, open_cache):
    prompts = [prompt(1 + number, 20, seed=number) for number in range(3)]
    alone = []
    for inputs in prompts:
        with open_cache(llama, config) as cache:
            alone.append(greedy(llama, inputs, cache, tokens=40))

    def answer(number: int) -> None:
        for _ in range(2):
            with open_cache(llama, config) as cache:
                assert torch.equal(greedy(llama, prompts[number], cache, tokens=40), alone[number])

    at_once(*(lambda number=number: answer(number) for number in range(3)))


def test_one_cache_in_two_threads_is_refused(llama, open_cache):
    """The second is told so, and the first goes on unharmed."""
    cache, ids = open_cache(llama), prompt(1, 12)["input_ids"]
    inside, refused = threading.Event(), threading.Event()
    told = []

    def wait(*arguments):
        inside.set()
        assert refused.wait(60)

    def second():
        assert inside.wait(60)
        handle.remove()
        try:
            forward(llama, ids, cache)
        except KVSwapError as error:
            told.append(str(error))
        finally:
            refused.set()

    handle = llama.model.layers[1].mlp.register_forward_hook(wait)
    logits = []
    at_once(lambda: logits.append(forward(llama, ids, cache)), second)
    assert len(told) == 1 and "one thread at a time" in told[0]
    torch.testing.assert_close(logits[0], forward(llama, ids, None))
    # One after the other is no mistake.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(forward, llama, ids[:, :1], cache).result()
    assert cache.get_seq_length() == 13


def test_an_interrupted_pass_does_not_last_into_the_next(llama, open_cache):
    """Ctrl-C leaves a pass without its last hooks; masks of other caches must be theirs again."""
    cache, inputs = open_cache(llama), INPUTS["padded"]
    expected = greedy(llama, inputs)
    with ctrl_c(llama.model.layers[1].mlp, after=True):
        forward(llama, inputs["input_ids"], cache)
    assert torch.equal(greedy(llama, inputs), expected)
    with ThreadPoolExecutor(1) as threads:
        assert torch.equal(threads.submit(greedy, llama, inputs).result(), expected)
    cache.reset()
    with ThreadPoolExecutor(1) as threads:
        assert torch.equal(threads.submit(greedy, llama, inputs, cache).result(), expected)


@pytest.mark.parametrize("previous", ["eager", "sdpa"])
def test_a_copy_of_the_model_has_its_previous_attention(previous, sessions, tmp_path):
    model = tiny_model("llama")
    model.set_attn_implementation(previous)
    inputs = INPUTS["padded"]
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        other = copy.deepcopy(model)
        assert other.config._attn_implementation == previous
        assert model.config._attn_implementation == "kvswap"
        expected = greedy(other, inputs)
        assert torch.equal(greedy(model, inputs, cache), expected)
        with pytest.raises(ValueError, match="model it was opened for"):
            forward(other, inputs["input_ids"][:, :1], cache)
    assert torch.equal(greedy(other, inputs), expected)


def test_a_cache_that_is_closed_as_a_pass_begins_is_named(open_cache, monkeypatch):
    """By then the model has its own attention again, which is not what went wrong."""
    model = tiny_model("llama")
    cache = open_cache(model)
    check_open = cache.driver.check_open

    def and_then_close():
        check_open()
        at_once(cache.close)

    monkeypatch.setattr(cache.driver, "check_open", and_then_close)
    with pytest.raises(ClosedError):
        greedy(model, INPUTS["plain"], cache, tokens=3)
