"""Choosing groups: which may be chosen, the best of them, and the columns they stand for.

As the engine does it (csrc/engine/step.cpp): a token at column p is decoded when p columns are in
the cache; what is sealed of them may be chosen, sinks and tail are attended anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.quality.view import View


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
        grouped = tokens[..., : tokens.shape[-1] // size * size].unflatten(-1, (-1, size))
        return grouped.amax(-1) if reduce == "max" else grouped.sum(-1)

    def best(self, scores: torch.Tensor, view: View) -> torch.Tensor:
        """The best choosable groups: bool like `scores`, ``[..., n, groups]``."""
        scores = scores.masked_fill(~self.choosable(view), -torch.inf)
        top = scores.topk(min(self.groups_max, scores.shape[-1]), dim=-1)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        return chosen.scatter_(-1, top.indices, top.values.isfinite())

    def columns(self, chosen: torch.Tensor, view: View) -> torch.Tensor:
        """Chosen groups ``[..., n, groups]`` to attended columns ``[..., n, columns]``, bool."""
        spread = chosen.repeat_interleave(self.group_tokens, -1)
        spread = torch.nn.functional.pad(spread, (0, view.columns - spread.shape[-1]))
        return spread | self.always(view)

    def chosen(self, mask: torch.Tensor, view: View) -> torch.Tensor:
        """The way back: attended columns to chosen groups."""
        return self.group(mask) & self.choosable(view)
