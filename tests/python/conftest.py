"""Fixtures of the tests that drive a model with a cache on disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.how_long import covering, is_long


def pytest_configure(config: pytest.Config) -> None:
    """Old names of settings are taken for one release, and many tests still use them."""
    told = "ignore:SwapConfig. since version 2:DeprecationWarning"
    config.addinivalue_line("filterwarnings", told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What the marks `long` and `pairs` leave out is deselected, but not in `make test-long`."""
    if is_long():
        return
    left_out = {item for item in items if item.get_closest_marker("long")}
    tables: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs") and item not in left_out:
            tables.setdefault((item.path, item.originalname), []).append(item)
    for table in tables.values():
        once = table[0].get_closest_marker("pairs").kwargs.get("once", ())
        # Values are told apart by their words: some have no order, some no hash.
        rows = [{name: repr(value) for name, value in i.callspec.params.items()} for i in table]
        chosen = covering(rows, once)
        left_out |= set(table) - {table[index] for index in chosen}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def no_more_threads_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them spin while they wait for one another: minutes, on a small machine."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    usual = torch.set_num_threads
    allowed = max(len(os.sched_getaffinity(0)), torch.get_num_threads())

    def set_num_threads(count: int) -> None:
        assert count <= allowed, f"a test asks for {count} threads of {allowed}"
        usual(count)

    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)


def _with_one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads over matrices as small as the tests' only wait for one another."""
    yield from _with_one_thread()


@pytest.fixture(scope="module")
def one_thread_throughout() -> Iterator[None]:
    """The same for a whole file, what its fixtures make included."""
    yield from _with_one_thread()


@pytest.fixture(params=["reference", "native", "host device"])
def sessions(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> str:
    """Runs a test over the plain-torch session and over the C++ one, on the CPU and on a device."""
    # Imported late: tests of the config need neither torch nor transformers.
    from kvswap_torch.hf import session
    from tests.python.tiny_models import SESSIONS, has_native, host_device_options

    if request.param != "reference" and not has_native():
        pytest.skip("kvswap_torch._C is not built")
    if request.param == "host device":
        monkeypatch.setattr(session, "cache_options", host_device_options)
    monkeypatch.setattr(session, "open_session", SESSIONS[request.param])
    return request.param


@pytest.fixture
def open_cache(sessions: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens caches in a fresh directory; closes them all at the end."""
    from kvswap_torch import KVSwapCache
    from tests.python.tiny_models import COVERING

    caches = []

    def open_one(model: Any, config: Any = COVERING, **arguments: Any) -> KVSwapCache:
        cache = KVSwapCache(model, path=tmp_path, config=config, **arguments)
        caches.append(cache)
        return cache

    yield open_one
    for cache in caches:
        cache.close()


@pytest.fixture(scope="module")
def llama() -> Any:
    """A tiny model whose layers are all on disk. Not to be changed."""
    from tests.python.tiny_models import tiny_model

    return tiny_model("llama")


@pytest.fixture(scope="module")
def gemma() -> Any:
    """A tiny model with sliding layers beside those on disk. Not to be changed."""
    from tests.python.tiny_models import tiny_model

    return tiny_model("gemma3")
