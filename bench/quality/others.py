"""What KVSwap's choice is compared with: the full cache, oracles, chance, and eviction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.quality.choosing import Frame
from bench.quality.view import View

POOLED_TOKENS = 5  # SnapKV's smoothing of neighbours
WINDOW = 32  # queries at the document's end that SnapKV looks with
ROWS = 256  # whose weights are computed at once


class Full:
    """The full cache."""

    def choose(self, view: View) -> None:
        return None


@dataclass(frozen=True)
class Oracle:
    """The groups with most true attention mass, mean over heads, in every row and layer.

    With `group_tokens` 1 the best tokens. It needs the full cache to know them: an upper bound on
    what one choice for all heads can do, not a method.
    """

    frame: Frame

    def choose(self, view: View) -> torch.Tensor:
        mass = torch.cat(
            [
                sum(mass for _, mass in view.masses(rows))
                for rows in torch.arange(view.batch * view.rows).split(ROWS)
            ]
        ).unflatten(0, (view.batch, view.rows))
        groups = self.frame.group(mass, "sum")[:, None]
        return self.frame.columns(self.frame.best(groups, view), view)


@dataclass(frozen=True)
class Chance:
    """Groups at random, other ones in each row: what sinks and tail alone are worth."""

    frame: Frame
    seed: int = 0

    def choose(self, view: View) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1009 * view.layer)
        size = (view.batch, 1, view.rows, view.columns // self.frame.group_tokens)
        groups = torch.rand(size, generator=generator)
        return self.frame.columns(self.frame.best(groups, view), view)


@dataclass(frozen=True)
class Recent:
    """Sinks and the newest tokens only (StreamingLLM).

    Parameters
    ----------
    kept
        Tokens of a layer that are in memory, sinks among them.
    """

    kept: int
    sink_tokens: int

    def choose(self, view: View) -> torch.Tensor:
        column = torch.arange(view.columns)
        newest = column > view.positions()[:, None] - (self.kept - self.sink_tokens)
        mask = (newest | (column < self.sink_tokens)) & view.causal()
        return mask.expand(view.batch, 1, -1, -1)


@dataclass(frozen=True)
class Snap:
    """Tokens that the document's end looks at are kept, each KV head its own (SnapKV).

    The choice is made once, before the question is known; what is not kept is lost. A sample's own
    tokens are all kept. What a token was paid is the average of five, as in SnapKV's code.

    Parameters
    ----------
    kept
        Tokens of the document, layer and KV head that stay in memory.
    """

    kept: int

    def choose(self, view: View) -> torch.Tensor:
        kept = view.past.once("kept", lambda: self._keep(view))  # [kv_heads, tokens]
        mask = kept[:, None].expand(-1, view.rows, -1)
        own = view.causal()[:, view.past.tokens :].expand(view.kv_heads, -1, -1)
        return torch.cat([mask, own], 2).expand(view.batch, -1, -1, -1)

    def _keep(self, view: View) -> torch.Tensor:
        tokens, window = view.past.tokens, min(WINDOW, view.past.tokens)
        keys = view.past.keys.float()  # [tokens, kv_heads, head_dim]
        query = view.past.last_query[0, :, -window:].float() * view.scale
        query = query.unflatten(0, (view.kv_heads, view.repeats))
        later = torch.arange(tokens) > torch.arange(tokens - window, tokens)[:, None]
        scores = torch.einsum("hrwd,thd->hrwt", query, keys).masked_fill_(later, -torch.inf)
        seen = scores.softmax(-1).sum((1, 2))  # [kv_heads, tokens]
        # Of tokens before the window, which do not count for their neighbours.
        pooled = torch.full_like(seen, torch.inf)
        if window < tokens:
            pooled[:, : tokens - window] = torch.nn.functional.avg_pool1d(
                seen[:, : tokens - window], POOLED_TOKENS, stride=1, padding=POOLED_TOKENS // 2
            )
        kept = torch.zeros_like(pooled, dtype=torch.bool)
        return kept.scatter_(1, pooled.topk(min(self.kept, tokens), dim=1).indices, True)
