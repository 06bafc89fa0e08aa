"""Passes, crops and selections under which the disk fails, each made again once it is well."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import torch

from kvswap_torch import KVSwapCache
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.errors import StorageError
from tests.how_long import lives
from tests.python.faulty_kernel import FaultyKernel
from tests.python.tiny_models import tokens_of

EVERY_CALL = os.environ.get("KVSWAP_TEST_EVERY_CALL") == "1"


def persistently(step: Callable[[], Any], disk: FaultyKernel, failures: list[str]) -> Any:
    """Makes a step again after a fault, the disk healed."""
    try:
        return step()
    except StorageError as error:
        assert error.errno
        assert error.filename
        failures.append(str(error))
        disk.heal()
    return step()


def converse(model: Any, cache: KVSwapCache, batch: int, run: Callable[[Callable], Any]) -> list:
    """Prefill, a second chunk, decoding, crop, select: the tokens that are most likely."""
    told = []

    @torch.no_grad()
    def forward(new: torch.Tensor) -> torch.Tensor:
        logits = model(new, **cache_argument(model, cache)).logits[:, -1]
        return logits.argmax(-1, keepdim=True)

    chunk = tokens_of(batch, 37)
    told.append(run(lambda: forward(chunk)))
    second = tokens_of(batch, 21, seed=6)
    told.append(run(lambda: forward(second)))
    for _ in range(6):
        newest = told[-1]
        told.append(run(lambda newest=newest: forward(newest)))
    run(lambda: cache.crop(-9))
    told.append(run(lambda: forward(tokens_of(batch, 2, seed=7))))
    order = torch.arange(batch).flip(0)
    run(lambda: cache.batch_select_indices(order))
    told.append(run(lambda: forward(tokens_of(batch, 3, seed=8))))
    for _ in range(3):
        newest = told[-1]
        told.append(run(lambda newest=newest: forward(newest)))
    return told


def at_every_call(
    disk: FaultyKernel,
    call: str,
    opened: Callable[[], KVSwapCache],
    live: Callable[[KVSwapCache], list[torch.Tensor]],
    undisturbed: list[torch.Tensor],
) -> None:
    """The nth call of its kind fails in the life of a new cache: what it tells is `undisturbed`.

    For n = 1, 2, 3 ... until there is no call so late: every one at first, then ever fewer, since
    faults late in a long row differ little.
    """
    nth, struck = 1, True
    while struck:
        with opened() as cache:
            disk.arm(call, nth=nth, lasts=True, error=errno.ENODEV)
            told = live(cache)
            struck = disk.injected > 0
            disk.heal()
        assert all(map(torch.equal, told, undisturbed)), (call, nth)
        nth += 1 if nth < lives(3, 8) or EVERY_CALL else nth // lives(2, 4)
