"""Gradients do not pass through a cache: an error where they are asked for."""

from __future__ import annotations

from typing import Any

import torch

from kvswap_torch.errors import KVSwapError


class NoGradient(torch.autograd.Function):
    """Passes an output on; says so when somebody asks for gradients through the cache."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise KVSwapError("KVSwapCache: is for inference, gradients do not pass through the disk")
