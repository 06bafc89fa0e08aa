"""Rows of four bits an element: their sizes, and their steps. csrc/kernels/int4_records.h."""

from __future__ import annotations

import torch
from torch import Tensor


def int4_block(head_dim: int) -> int:
    """Elements that are rotated together and share a scale, the most that divides `head_dim`."""
    return next((size for size in (64, 32) if head_dim % size == 0), 16)


def int4_row_bytes(head_dim: int) -> int:
    """Of one token of one KV head, K or V: a scale for each block, and half a byte an element."""
    return head_dim // int4_block(head_dim) + head_dim // 2


def int4_head_bytes(group_tokens: int, head_dim: int, value_dim: int = 0) -> int:
    """Of one KV head of a record: the mean of K, K and V; `value_dim` 0: as wide as K."""
    values = group_tokens * int4_row_bytes(value_dim or head_dim)
    return (group_tokens + 1) * int4_row_bytes(head_dim) + values


def int4_rotated(rows: Tensor) -> Tensor:
    """Each block of ``[..., head_dim]`` in fp32 times its Hadamard matrix: what is coded."""
    block = int4_block(rows.shape[-1])
    matrix = torch.ones(1, 1, device=rows.device)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (rows.unflatten(-1, (-1, block)) @ (matrix / block**0.5)).flatten(-2)


def int4_steps(rows: Tensor, group_tokens: int) -> Tensor:
    """The most that a step can be, of each rotated element of ``[..., tokens, head_dim]``.

    Of K: that of its difference to the mean of its group, and that of the mean.
    """
    block = int4_block(rows.shape[-1])
    parts = []
    for group in int4_rotated(rows).split(group_tokens, -2):
        mean = group.mean(-2, keepdim=True)
        sizes = [part.unflatten(-1, (-1, block)).abs().amax(-1) for part in (group - mean, mean)]
        largest = sizes[0] + sizes[1] * (1 + 0.5 / 7.5)
        parts.append((1.125 / 7.5 * largest).repeat_interleave(block, -1))
    return torch.cat(parts, -2)
