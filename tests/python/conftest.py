"""Fixtures of the tests that drive a model with a cache on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["reference", "native"])
def sessions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test over the plain-torch session and over the C++ one."""
    # Imported late: tests of the config need neither torch nor transformers.
    import torch
    from tests.python.tiny_models import SESSIONS, has_native

    from kvswap_torch.hf import session

    torch.set_num_threads(1)  # matrices this small only wait for one another

    if request.param == "native" and not has_native():
        pytest.skip("kvswap_torch._C is not built")
    monkeypatch.setattr(session, "open_session", SESSIONS[request.param])
    return request.param


@pytest.fixture
def open_cache(sessions: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens caches in a fresh directory; closes them all at the end."""
    from tests.python.tiny_models import COVERING

    from kvswap_torch import KVSwapCache

    caches = []

    def open_one(model: Any, config: Any = COVERING, **arguments: Any) -> KVSwapCache:
        cache = KVSwapCache(model, path=tmp_path, config=config, **arguments)
        caches.append(cache)
        return cache

    yield open_one
    for cache in caches:
        cache.close()
