"""What a model would choose, step by step, for every group size: recall and reuse come of it.

KVSwap, appendix A.1: the reuse buffer's hit rate depends on how much consecutive steps choose in
common, so steps are recorded one after the other, over the decoded tokens of held-out samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvswap_torch.projection import Pair
from kvswap_torch.tuning.look_ups import FoundSteps, attention_views, shares_found, sources
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.recall import Choice, GroupScores, Steps, worth
from kvswap_torch.tuning.samples import Sample

GROUPS = (1, 2, 4, 8, 16, 32)
TOKENS_SHARES = (1.0, 0.5, 0.25, 0.125)  # of the tokens attended at most
STEPS_MAX = 96  # consecutive steps recorded of a sample


@dataclass(frozen=True)
class Recorded:
    """One sample's choices with one group size.

    Parameters
    ----------
    context
        Tokens that were in the cache at the first step.
    layers
        For each layer ``[steps, M]`` int32, a row rising, -1 where fewer were chosen.
    """

    context: int
    layers: tuple[torch.Tensor, ...]

    @property
    def steps(self) -> int:
        """Steps recorded."""
        return len(self.layers[0])

    def chosen(self, layer: int, step: int) -> np.ndarray:
        """The groups of one step, rising."""
        row = self.layers[layer][step].numpy().astype(np.int64)
        return row[row >= 0]


@dataclass(frozen=True)
class Choices:
    """Of one model and text.

    Parameters
    ----------
    tokens
        Attended per step, sinks and tail apart: M = tokens / G.
    rank
        Columns that the recorded choices were made with.
    recall
        Group size -> for each layer, rank -> `tuning.recall.worth`.
    best
        Group size -> for each layer what the best possible choice is worth.
    recorded
        Group size -> one entry a sample.
    fewer
        Tokens attended, fewer than `tokens` -> as `recall`.
    ahead
        As `recorded`: what predicted queries select by the same projections. Rows of -1 for a layer
        that is not predicted; empty: nothing is known of predictions.
    """

    tokens: int
    rank: int
    recall: dict[int, list[dict[int, float]]]
    best: dict[int, list[float]]
    recorded: dict[int, list[Recorded]]
    fewer: dict[int, dict[int, list[dict[int, float]]]] = field(default_factory=dict)
    ahead: dict[int, list[Recorded]] = field(default_factory=dict)

    def recall_of(self, group: int, tokens: int) -> list[dict[int, float]]:
        """`recall` where at most so many tokens are attended: the nearest that was measured."""
        measured = {self.tokens: self.recall} | self.fewer
        return measured[max((each for each in measured if each <= tokens), default=min(measured))][
            group
        ]

    @property
    def groups(self) -> tuple[int, ...]:
        """Group sizes, rising."""
        return tuple(sorted(self.recorded))

    @property
    def middle_group(self) -> int:
        """The group size nearest to 4, where one has to stand for all."""
        return min(self.groups, key=lambda group: abs(group - 4))


class Recorder:
    """Observes samples; see `record_choices`. Layers select by their true queries.

    What the predicted query selects is recorded in addition, at the middle rank.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        choice: Choice,
        groups: Sequence[int],
        ranks: Sequence[int],
        summary_dtype: str,
    ):
        self.pairs, self.choice = pairs, choice
        self.groups, self.ranks, self.summary_dtype = tuple(groups), tuple(ranks), summary_dtype
        self.tokens = choice.group_tokens * choice.groups_max
        self.rank = self.ranks[len(self.ranks) // 2]
        empty = [dict.fromkeys(self.ranks, 0.0) for _ in pairs]
        self.attended = tuple(int(share * self.tokens) for share in TOKENS_SHARES)
        places = [(group, tokens) for group in self.groups for tokens in self.attended]
        self.sums = {place: [dict(layer) for layer in empty] for place in places}
        self.found: dict[tuple[int, int], list[FoundSteps]] = {
            place: [{rank: [] for rank in self.ranks} for _ in pairs] for place in places
        }
        self.sought: list[list[torch.Tensor]] = [[] for _ in pairs]
        self.best = {group: [0.0] * len(pairs) for group in self.groups}
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.ahead: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        self.rows = {group: [] for group in self.groups}
        self.ahead = {group: [] for group in self.groups}

    def add(self, seen: Observed, sample: Sample) -> None:
        """One layer of a sample."""
        last = min(len(sample.ids), sample.focus + STEPS_MAX)
        positions = torch.arange(sample.focus, last)
        views = attention_views(seen, positions, sources(sample.ids, positions))
        scores = GroupScores(seen, seen.query, self.pairs[seen.layer], positions, self.choice)
        of_size = {
            group: Steps(seen, positions, self._choice(group), views) for group in self.groups
        }
        for rank in self.ranks:
            of_sizes = scores.at(rank, self.summary_dtype, list(of_size.values()))
            for (group, steps), own in zip(of_size.items(), of_sizes, strict=True):
                self._count(group, seen.layer, rank, steps, own)
                if rank == self.rank:
                    self.rows[group].append(_rising(steps.select(own), steps.choosable))
        self._look_ahead(seen, positions, of_size)
        for group, steps in of_size.items():
            self.best[group][seen.layer] += steps.best_recall()
        self.sought[seen.layer].append(of_size[self.groups[0]].sought())

    def _look_ahead(
        self, seen: Observed, positions: torch.Tensor, of_size: dict[int, Steps]
    ) -> None:
        if seen.predicted is None:
            for group in of_size:
                self.ahead[group].append(torch.full_like(self.rows[group][-1], -1))
            return
        scores = GroupScores(seen, seen.predicted, self.pairs[seen.layer], positions, self.choice)
        of_sizes = scores.at(self.rank, self.summary_dtype, list(of_size.values()))
        for (group, steps), own in zip(of_size.items(), of_sizes, strict=True):
            self.ahead[group].append(_rising(steps.select(own), steps.choosable))

    def _count(self, group: int, layer: int, rank: int, steps: Steps, scores: torch.Tensor) -> None:
        """What the best groups hold and find; fewer are chosen anew, since choices are rising."""
        for tokens in self.attended:
            best = steps.select(scores, max(1, tokens // group))
            self.sums[group, tokens][layer][rank] += steps.recall(best)
            self.found[group, tokens][layer][rank].append(steps.found(best))

    def _choice(self, group: int) -> Choice:
        return dataclasses.replace(self.choice, group_tokens=group, groups_max=self.tokens // group)

    def worth(self, samples: int, tokens: int) -> dict[int, list[dict[int, float]]]:
        """Group size -> `tuning.recall.worth` where so many tokens are attended."""

        def mean(layers: list[dict[int, float]]) -> list[dict[int, float]]:
            return [{rank: total / samples for rank, total in layer.items()} for layer in layers]

        return {
            group: worth(
                mean(self.sums[group, tokens]), shares_found(self.found[group, tokens], self.sought)
            )
            for group in self.groups
        }

    def best_worth(self, samples: int) -> dict[int, list[float]]:
        """Group size -> for each layer what the best possible choice is worth."""
        sought = shares_found([{0: layer} for layer in self.sought], self.sought)
        return {
            group: [layer[0] for layer in worth([{0: value / samples} for value in layers], sought)]
            for group, layers in self.best.items()
        }


def _rising(chosen: torch.Tensor, choosable: torch.Tensor) -> torch.Tensor:
    allowed = choosable.gather(1, chosen)
    high = torch.iinfo(torch.int32).max
    rows = chosen.int().masked_fill(~allowed, high).sort(1).values
    return rows.masked_fill(rows == high, -1)


def record_choices(
    calibrator: Calibrator,
    samples: Sequence[Sample],
    recorder: Recorder,
    progress: Progress | None = None,
) -> Choices:
    """Lets the model read the samples, and records what it would choose.

    Parameters
    ----------
    recorder
        New: it belongs to this call.
    """
    recorded: dict[int, list[Recorded]] = {group: [] for group in recorder.groups}
    ahead: dict[int, list[Recorded]] = {group: [] for group in recorder.groups}
    for number, sample in enumerate(samples):
        if progress is not None:
            progress("recording choices", number, len(samples))
        recorder.begin()
        calibrator.read(sample, lambda seen, sample=sample: recorder.add(seen, sample))
        for group, rows in recorder.rows.items():
            recorded[group].append(Recorded(sample.focus, tuple(rows)))
            ahead[group].append(Recorded(sample.focus, tuple(recorder.ahead[group])))
    if progress is not None:
        progress("recording choices", len(samples), len(samples))
    count = len(samples)
    every, *fewer = recorder.attended
    return Choices(
        recorder.tokens,
        recorder.rank,
        recorder.worth(count, every),
        recorder.best_worth(count),
        recorded,
        {tokens: recorder.worth(count, tokens) for tokens in fewer},
        ahead,
    )


BLOCK_TOKENS = 64


def stretched(groups: np.ndarray, group_tokens: int, context: int, target: int) -> np.ndarray:
    """Choices made in one context as they would lie in a longer or shorter one; rising.

    Blocks of 64 tokens are moved apart or together, so that neighbours stay neighbours; of two
    groups that fall on each other one is kept.
    """
    per_block = max(1, BLOCK_TOKENS // group_tokens)
    blocks = -(-context // (group_tokens * per_block))
    wanted = max(1, target // group_tokens // per_block)
    moved = groups // per_block * wanted // blocks * per_block + groups % per_block
    return np.unique(np.minimum(moved, target // group_tokens - 1))
