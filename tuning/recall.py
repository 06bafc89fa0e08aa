"""What the chosen groups hold of what attention looks for, per layer and rank.

Choices are made as the engine makes them: by low-rank products summed over heads (KVSwap, section
3.3), or by each head's softmax over them; the M best groups are attended together with sinks and
tail. Two things are measured against the model's own softmax: the mass held, mean over heads, and
what of the look-ups is *found* (`kvswap_torch.tuning.look_ups`). Answers need the second, and a
mean over heads does not see it: on a real model it was 0.91 whether the answer's distribution was
kept (a divergence of 0.03) or lost (0.45).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvswap_torch import ops
from kvswap_torch.projection import Pair, flat_tokens, sum_over_heads
from kvswap_torch.tuning.look_ups import FoundSteps, attention_views, shares_found
from kvswap_torch.tuning.observe import Observed

SUMMARY_LEVELS = ("int8", "int4")  # of `summary.dtype` those of whole numbers, with a scale a token
INT4_MOST = 7
FEW = 4  # of the groups attended one in so many: where selections are tight, predictions show
RANKS = (4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
QUERIES = ("predicted", "true")


@dataclass(frozen=True)
class Choice:
    """How groups are chosen, as in `SwapConfig`."""

    group_tokens: int = 4
    groups_max: int = 100
    sink_tokens: int = 4
    tail_tokens: int = 32
    score: str = "mass"


def kept_rows(rows: torch.Tensor, summary_dtype: str) -> torch.Tensor:
    """What a summary of whole numbers keeps of low-rank rows ``[tokens, rank]``, fp32.

    int8 is what the cache's own op makes of them, which knows no int4.
    """
    if summary_dtype == "int8":
        numbers, scale = ops.project_keys(
            rows[None, None].contiguous(), torch.eye(rows.shape[1]), torch.int8
        )
        blocks = numbers[0].float() * scale[0][:, None]  # [blocks, rank, 16]
        return blocks.transpose(1, 2).flatten(0, 1)[: len(rows)]
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / INT4_MOST
    return (rows / scale).round() * scale


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
    views
        Their `attention_views`, where they are known already.
    wanted
        Their `sources`, for `found`.
    """

    def __init__(
        self,
        seen: Observed,
        positions: torch.Tensor,
        choice: Choice,
        views: tuple[torch.Tensor, torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
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
        if views is None:
            views = attention_views(seen, positions, wanted)
        self.mass, self.looked_up = map(self._grouped, views)  # [steps, groups]
        self.always = 1.0 - self.mass.sum(1)  # sinks and tail

    def _grouped(self, tokens: torch.Tensor) -> torch.Tensor:
        group = self.choice.group_tokens
        sums = tokens[:, : self.groups * group].unflatten(1, (self.groups, group)).sum(2)
        return sums.masked_fill(~self.choosable, 0.0)

    def select(self, scores: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """The chosen groups of each step, ``[steps, at most M]``, rising.

        Where fewer can be chosen one that cannot, and weighs nothing, fills up.

        Parameters
        ----------
        scores
            ``[steps, groups]``.
        most
            In the place of M.
        """
        best = scores.masked_fill(~self.choosable, -torch.inf)
        most = self.choice.groups_max if most is None else most
        indices, _ = ops.top_k_groups(best, min(most, self.groups))
        nothing = self.choosable.int().argmin(1, keepdim=True)  # one that weighs nothing
        return torch.where(indices < 0, nothing, indices.long())

    def largest(self, tokens: torch.Tensor) -> torch.Tensor:
        """A group as its best token: ``[steps, tokens]`` -> ``[steps, groups]``."""
        group = self.choice.group_tokens
        return ops.group_max(tokens[:, : self.groups * group].contiguous(), group)

    def shares(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights ``[steps, tokens]`` as shares of all that may be chosen: ``[steps, groups]``."""
        masses = self._grouped(weights)
        return masses / masses.sum(1, keepdim=True).clamp_min(1e-30)

    def recall(self, chosen: torch.Tensor) -> float:
        """Mean over steps of the mass in `chosen`, sinks and tail; chosen: ``[steps, n]``."""
        return (self.mass.gather(1, chosen).sum(1) + self.always).mean().item()

    def found(self, chosen: torch.Tensor) -> torch.Tensor:
        """The look-ups' weights in `chosen`, summed over heads: ``[steps]``."""
        return self.looked_up.gather(1, chosen).sum(1)

    def sought(self) -> torch.Tensor:
        """The same of all groups that could be chosen: ``[steps]``."""
        return self.looked_up.sum(1)

    def best_recall(self) -> float:
        """What the best choice of as many groups would hold."""
        return self.recall(self.select(self.mass))


class GroupScores:
    """What a layer's groups score for each step, at any number of columns.

    Parameters
    ----------
    look
        ``[1, heads, tokens, head_dim]``: the queries to choose with.
    pair
        With columns for the largest rank asked for.
    """

    def __init__(
        self,
        seen: Observed,
        look: torch.Tensor,
        pair: Pair,
        positions: torch.Tensor,
        choice: Choice,
    ):
        self._choice, self._scale, self._dtype = choice, seen.scale, seen.keys.dtype
        kv_heads = seen.keys.shape[1]
        key, query = pair
        self._rows = flat_tokens(seen.keys).float() @ key
        look = look[:, :, positions]
        if choice.score == "sum":
            self._low = sum_over_heads(look, kv_heads) @ query
            return
        sides = query.unflatten(0, (kv_heads, -1)).repeat_interleave(look.shape[1] // kv_heads, 0)
        self._low = look[0].float() @ sides  # [heads, steps, columns]
        token = torch.arange(seen.keys.shape[2])
        self._later = token > positions[:, None]
        near = token > positions[:, None] - choice.tail_tokens
        self._kept = near | (token < choice.sink_tokens)  # in memory anyway

    def at(self, rank: int, summary_dtype: str, sizes: Sequence[Steps]) -> list[torch.Tensor]:
        """For each of `sizes` ``[steps, groups]`` with the first `rank` columns."""
        has_levels = summary_dtype in SUMMARY_LEVELS
        kept = self._rows[:, :rank]
        kept = kept_rows(kept, summary_dtype) if has_levels else kept.to(self._dtype).float()
        if self._choice.score == "sum":
            products = self._low[:, :rank] @ kept.T
            return [steps.largest(products) for steps in sizes]
        join = torch.add if self._choice.score == "mass" else torch.maximum
        joined = [torch.zeros(steps.choosable.shape) for steps in sizes]
        for low in self._low[:, :, :rank]:
            # Rows of whole numbers are met by queries of such.
            logits = (kept_rows(low, "int8") if has_levels else low) @ kept.T * self._scale
            logits.masked_fill_(self._later, -torch.inf)
            most = logits.masked_fill(self._kept, -torch.inf).amax(1, keepdim=True)
            weights = (logits - most.nan_to_num(neginf=0.0)).exp()
            joined = [
                join(total, steps.shares(weights))
                for total, steps in zip(joined, sizes, strict=True)
            ]
        return joined


HELD_SHARE = 0.2  # of a layer's worth; by more of it settings rank less as answers do


def worth(
    held: Sequence[dict[int, float]], found: Sequence[dict[int, float]]
) -> list[dict[int, float]]:
    """For each layer, rank -> what it is worth to answers; their mean over layers is 0 to 1.

    A fifth of it is the attention mass held; the rest, what is found of all that the layers seek,
    so that layers that look nothing up have little use for columns. On a real model settings rank
    by it as by their answers' divergence from the full cache (docs/choosing.md).

    Parameters
    ----------
    held
        For each layer, rank -> attention mass held.
    found
        For each layer, rank -> `shares_found`; empty: nothing is looked up, and mass decides.
    """
    if not found:
        return [dict(layer) for layer in held]
    share = (1 - HELD_SHARE) * len(held)
    return [
        {rank: HELD_SHARE * value + share * finds[rank] for rank, value in holds.items()}
        for holds, finds in zip(held, found, strict=True)
    ]


class RecallTable:
    """Recall of one way to choose, per layer and rank, averaged over samples.

    Parameters
    ----------
    pairs
        One projection a layer on disk, with columns for the largest of `ranks`.
    summary_dtype
        As in `SwapConfig`.
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
        self._found: list[FoundSteps] = [{rank: [] for rank in self.ranks} for _ in pairs]
        self._found_by_few: list[FoundSteps] = [{rank: [] for rank in self.ranks} for _ in pairs]
        self._sought: list[list[torch.Tensor]] = [[] for _ in pairs]
        self._best = [0.0] * len(pairs)
        self._samples = [0] * len(pairs)

    def add(self, seen: Observed, steps: Steps) -> None:
        """Counts some of one layer's steps."""
        is_true = self.query == "true" or seen.predicted is None
        look = seen.query if is_true else seen.predicted
        pair = self.pairs[seen.layer]
        scores = GroupScores(seen, look, pair, steps.positions, steps.choice)
        for rank in self.ranks:
            of_groups = scores.at(rank, self.summary_dtype, [steps])[0]
            chosen = steps.select(of_groups)
            self._sums[seen.layer][rank] += steps.recall(chosen)
            self._found[seen.layer][rank].append(steps.found(chosen))
            few = steps.select(of_groups, max(1, steps.choice.groups_max // FEW))
            self._found_by_few[seen.layer][rank].append(steps.found(few))
        self._sought[seen.layer].append(steps.sought())
        self._best[seen.layer] += steps.best_recall()
        self._samples[seen.layer] += 1

    def recall(self) -> list[dict[int, float]]:
        """For each layer, rank -> recall."""
        return [
            {rank: total / count for rank, total in sums.items()}
            for sums, count in zip(self._sums, self._samples, strict=True)
        ]

    def found(self) -> list[dict[int, float]]:
        """For each layer, rank -> look-ups found; see `shares_found`."""
        return shares_found(self._found, self._sought)

    def worth(self) -> list[dict[int, float]]:
        """For each layer, rank -> what it is worth; see `worth`."""
        return worth(self.recall(), self.found())

    def found_by_few(self) -> list[float]:
        """For each layer the look-ups that a quarter of the groups finds, mean over ranks.

        As `shares_found`; 0 where nothing is looked up.
        """
        shares = shares_found(self._found_by_few, self._sought)
        if not shares:
            return [0.0] * len(self.pairs)
        return [sum(layer.values()) / len(self.ranks) for layer in shares]

    def best(self) -> list[float]:
        """For each layer what the best possible choice holds."""
        return [best / count for best, count in zip(self._best, self._samples, strict=True)]
