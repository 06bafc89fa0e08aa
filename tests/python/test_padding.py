"""Masks are checked with one transfer from a device, which alone the host waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvswap_torch.hf.padding import Padding

WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")


class CountedWaits(TorchDispatchMode):
    """Operations that read one number of a tensor: each waits for the device that computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def masks(padded: bool) -> list[torch.Tensor]:
    """Of a prompt of 6 and three steps, for two sequences; one is padded on the left."""
    steps = [torch.ones(2, 6 + step, dtype=torch.long) for step in range(4)]
    for mask in steps:
        mask[1, :2] = 0 if padded else 1
    return steps


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_is_looked_at_once(padded: bool) -> None:
    padding, positions = Padding(), 0
    for mask in masks(padded):
        tokens = mask.shape[1] - positions
        with CountedWaits() as waits:
            past, new = padding.declare(positions, 2, tokens, mask)
        assert waits.seen == [] and past is None
        assert (new is None) == (positions > 0 or not padded)
        padding.commit()
        positions += tokens
    assert (padding.valid is None) == (not padded)


def test_padding_may_come_later_and_stays() -> None:
    padding = Padding()
    first, second, third, _ = masks(padded=True)
    padding.declare(0, 2, 6, first)
    padding.commit()
    second[0, 0] = 0
    past, new = padding.declare(6, 2, 1, second)
    assert past is not None and torch.equal(past, second[:, :6].bool()) and new is None
    padding.commit()
    with pytest.raises(ValueError, match="must stay padding"):
        padding.declare(7, 2, 1, third)
