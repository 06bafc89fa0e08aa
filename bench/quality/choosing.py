"""Choosing groups: which may be chosen, the best of them, and the columns they stand for.

By the cache's own ops, as the engine does it (csrc/engine/layer_step.cpp): a token at column p is
decoded when p columns are in the cache; what is sealed of them may be chosen, sinks and tail are
attended anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.quality.view import View
from kvswap_torch import ops


@dataclass(frozen=True)
class Frame:
    """Sizes of a choice, as in `SwapConfig`."""

    group_tokens: int
    groups_max: int
    sink_tokens: int
    tail_tokens: int

    def sealed(self, view: View) -> torch.Tensor:
        """``[n]``: groups that each row finds sealed."""
        return (view.positions() - self.tail_tokens).clamp_min(0) // self.group_tokens

    def choosable(self, view: View) -> torch.Tensor:
        """``[n, groups]`` bool."""
        sinks = -(-self.sink_tokens // self.group_tokens)
        number = torch.arange(view.columns // self.group_tokens)
        return (number >= sinks) & (number < self.sealed(view)[:, None])

    def always(self, view: View) -> torch.Tensor:
        """``[n, columns]`` bool: sinks, and the tail with the row's own token."""
        column = torch.arange(view.columns)
        sealed = self.sealed(view)[:, None] * self.group_tokens
        sinks = -(-self.sink_tokens // self.group_tokens) * self.group_tokens
        return ((column >= sealed) | (column < sinks)) & view.causal()

    def group(self, tokens: torch.Tensor, reduce: str = "max") -> torch.Tensor:
        """``[..., columns]`` values of tokens to ``[..., groups]``, by maximum or sum."""
        size = self.group_tokens
        if reduce == "max":
            whole = tokens[..., : tokens.shape[-1] // size * size].float()
            best = ops.group_max(whole.flatten(0, -2).contiguous(), size)
            return best.unflatten(0, tokens.shape[:-1])
        grouped = tokens[..., : tokens.shape[-1] // size * size].unflatten(-1, (-1, size))
        return grouped.sum(-1)

    def best(self, scores: torch.Tensor, view: View) -> torch.Tensor:
        """The best choosable groups: bool like `scores`, ``[..., n, groups]``."""
        scores = scores.masked_fill(~self.choosable(view), -torch.inf)
        groups = scores.shape[-1]
        indices, _ = ops.top_k_groups(scores.flatten(0, -2), min(self.groups_max, groups))
        # -1, for none, is one that does not count.
        chosen = torch.zeros(len(indices), groups + 1, dtype=torch.bool)
        chosen.scatter_(1, indices.long() % (groups + 1), True)
        return chosen[:, :groups].unflatten(0, scores.shape[:-1])

    def columns(self, chosen: torch.Tensor, view: View) -> torch.Tensor:
        """Chosen groups ``[..., n, groups]`` to attended columns ``[..., n, columns]``, bool."""
        spread = chosen.repeat_interleave(self.group_tokens, -1)
        spread = torch.nn.functional.pad(spread, (0, view.columns - spread.shape[-1]))
        return spread | self.always(view)

    def chosen(self, mask: torch.Tensor, view: View) -> torch.Tensor:
        """The way back: attended columns to chosen groups."""
        return (self.group(mask, "sum") > 0) & self.choosable(view)
