"""How much of the true attention mass the chosen groups hold, per layer and rank.

Choices are made as the engine makes them (KVSwap, section 3.3): a token's score is the product of
its low-rank key and the low-rank query, summed over heads; a group's is its best token's; the M
best groups are attended together with sinks and tail. What they hold is measured against the
model's own softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvswap_torch.projection import Pair, flat_tokens, sum_over_heads
from kvswap_torch.tuning.observe import Observed

RANKS = (4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
QUERIES = ("predicted", "true")


@dataclass(frozen=True)
class Choice:
    """How groups are chosen, as in `SwapConfig`."""

    group_tokens: int = 4
    groups_max: int = 100
    sink_tokens: int = 4
    tail_tokens: int = 32


def rank_grid(width: int, most: int | None = None) -> tuple[int, ...]:
    """Ranks worth measuring for keys of `width` elements, at most `most`."""
    most = width if most is None else min(width, most)
    return tuple(rank for rank in RANKS if rank < most) + (most,)


def decoded_positions(tokens: int, focus: int, most: int) -> torch.Tensor:
    """Tokens `focus` .. `tokens` - 1, or `most` of them evenly, rising."""
    count = min(most, tokens - focus)
    return torch.linspace(focus, tokens - 1, count).round().long()


class Steps:
    """Decoding steps of one layer over one sample: who is choosable, and what it weighs.

    Parameters
    ----------
    positions
        ``[steps]``: the tokens that are decoded, rising.
    mass
        Their `attention_mass`, where it is known already.
    """

    def __init__(
        self,
        seen: Observed,
        positions: torch.Tensor,
        choice: Choice,
        mass: torch.Tensor | None = None,
    ):
        group, tokens = choice.group_tokens, seen.keys.shape[2]
        self.choice = choice
        self.positions = positions
        self.groups = tokens // group
        # Token t is decoded when t tokens are in the cache: its sealed groups, and the tail.
        self.sealed = (positions - choice.tail_tokens).clamp_min(0) // group
        sinks = -(-choice.sink_tokens // group)
        number = torch.arange(self.groups)
        self.choosable = (number >= sinks) & (number < self.sealed[:, None])
        if mass is None:
            mass = attention_mass(seen.query[0][:, positions], seen.keys[0], seen.scale, positions)
        grouped = mass[:, : self.groups * group].unflatten(1, (self.groups, group)).sum(2)
        self.mass = grouped.masked_fill(~self.choosable, 0.0)  # [steps, groups]
        self.always = 1.0 - self.mass.sum(1)  # sinks and tail

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """The chosen groups of each step, ``[steps, at most M]``.

        Parameters
        ----------
        scores
            ``[steps, tokens]``.
        """
        group = self.choice.group_tokens
        best = scores[:, : self.groups * group].unflatten(1, (self.groups, group)).amax(2)
        best = best.masked_fill(~self.choosable, -torch.inf)
        return best.topk(min(self.choice.groups_max, self.groups), dim=1).indices

    def recall(self, chosen: torch.Tensor) -> float:
        """Mean over steps of the mass in `chosen`, sinks and tail; chosen: ``[steps, n]``."""
        return (self.mass.gather(1, chosen).sum(1) + self.always).mean().item()

    def best_recall(self) -> float:
        """What the best choice of as many groups would hold."""
        return self.recall(self.mass.topk(min(self.choice.groups_max, self.groups), dim=1).indices)


def attention_mass(
    query: torch.Tensor, keys: torch.Tensor, scale: float, positions: torch.Tensor
) -> torch.Tensor:
    """Attention weights, mean over heads.

    Parameters
    ----------
    query
        ``[heads, steps, head_dim]``.
    keys
        ``[kv_heads, tokens, head_dim]``.
    positions
        ``[steps]``: each query's own token; later ones are not seen.

    Returns
    -------
    Tensor
        ``[steps, tokens]`` fp32.
    """
    later = torch.arange(keys.shape[1]) > positions[:, None]
    repeats = len(query) // len(keys)
    mass = torch.zeros(later.shape)
    for head, rows in enumerate(query.float()):
        scores = rows @ keys[head // repeats].float().T * scale
        mass += scores.masked_fill_(later, -torch.inf).softmax(-1)
    return mass / len(query)


def int8_rows(rows: torch.Tensor) -> torch.Tensor:
    """What an int8 summary keeps of low-rank keys ``[tokens, rank]``: one scale a token."""
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / scale).round() * scale


class RecallTable:
    """Recall of one way to choose, per layer and rank, averaged over samples.

    Parameters
    ----------
    pairs
        One projection a layer on disk, with columns for the largest of `ranks`.
    summary_dtype
        ``model`` or ``int8``, as in `SwapConfig`.
    query
        ``predicted`` by the layer before, as far as it can be, or ``true``.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        ranks: Sequence[int],
        summary_dtype: str = "model",
        query: str = "predicted",
    ):
        self.pairs = pairs
        self.ranks = tuple(ranks)
        self.summary_dtype = summary_dtype
        self.query = query
        self._sums = [dict.fromkeys(self.ranks, 0.0) for _ in pairs]
        self._best = [0.0] * len(pairs)
        self._samples = [0] * len(pairs)

    def add(self, seen: Observed, steps: Steps) -> None:
        """Counts some of one layer's steps."""
        key, query = self.pairs[seen.layer]
        is_true = self.query == "true" or seen.predicted is None
        look = seen.query if is_true else seen.predicted
        rows = flat_tokens(seen.keys).float() @ key
        low = sum_over_heads(look[:, :, steps.positions], seen.keys.shape[1]) @ query
        for rank in self.ranks:
            kept = rows[:, :rank]
            kept = int8_rows(kept) if self.summary_dtype == "int8" else kept.to(seen.keys.dtype)
            chosen = steps.select(low[:, :rank] @ kept.float().T)
            self._sums[seen.layer][rank] += steps.recall(chosen)
        self._best[seen.layer] += steps.best_recall()
        self._samples[seen.layer] += 1

    def recall(self) -> list[dict[int, float]]:
        """For each layer, rank -> recall."""
        return [
            {rank: total / count for rank, total in sums.items()}
            for sums, count in zip(self._sums, self._samples, strict=True)
        ]

    def best(self) -> list[float]:
        """For each layer what the best possible choice holds."""
        return [best / count for best, count in zip(self._best, self._samples, strict=True)]
