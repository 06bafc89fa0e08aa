"""Scoring in two stages: all groups by the first columns, the best of them by all columns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 16  # tokens whose rows stand together
CHUNK = 1024  # tokens, at most, whose blocks are compared


def in_two_stages(
    first: Tensor, whole: Tensor, group_tokens: int, share: float, wanted: int
) -> Tensor:
    """What groups score, ``[queries, groups]``: -inf where the first stage leaves them out.

    Groups are left out block by block, a block being the least number of whole groups and whole 16
    tokens; it is worth its best group. Of each chunk of blocks the best stay, the first among
    equals.

    Parameters
    ----------
    first, whole
        Scores ``[queries, groups]`` by the first columns and by all.
    share
        Of a chunk's blocks, rounded up, whose groups are scored by all columns.
    wanted
        Groups that a query chooses. Where it is more, their share of all blocks stays.
    """
    each = math.lcm(BLOCK, group_tokens) // group_tokens
    missing = -first.shape[1] % each
    padded = torch.nn.functional.pad(first, (0, missing), value=-torch.inf)
    blocks = padded.unflatten(1, (-1, each)).amax(2)
    stays = torch.zeros_like(blocks, dtype=torch.bool)
    begin, all_blocks = 0, blocks.shape[1]
    for chunk in blocks.split(max(1, CHUNK // (each * group_tokens)), dim=1):
        here = chunk.shape[1]
        count = max(math.ceil(share * here), -(-wanted * here // all_blocks))
        best = chunk.sort(dim=1, descending=True, stable=True).indices[:, :count]
        stays.scatter_(1, begin + best, True)
        begin += here
    left_out = ~stays.repeat_interleave(each, 1)[:, : first.shape[1]]
    return whole.masked_fill(left_out, -torch.inf)
