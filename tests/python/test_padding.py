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
            new = padding.declare(positions, 2, tokens, mask)
        assert waits.seen == []
        assert (new is None) == (positions > 0 or not padded)
        padding.commit()
        positions += tokens
    assert (padding.valid is None) == (not padded)


def test_what_was_said_of_earlier_positions_stands() -> None:
    padding = Padding()
    first, second = masks(padded=True)[:2]
    padding.declare(0, 2, 6, first)
    padding.commit()
    second[0, 0] = 0
    with pytest.raises(ValueError, match="some have changed"):
        padding.declare(6, 2, 1, second)
