"""What a model would choose, step by step, for every group size: recall and reuse come of it.

KVSwap, appendix A.1: the reuse buffer's hit rate depends on how much consecutive steps choose in
common, so steps are recorded one after the other, over the decoded tokens of held-out samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvswap_torch.projection import Pair, flat_tokens, sum_over_heads
from kvswap_torch.tuning.calibrate import Calibrator
from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.recall import Choice, Steps, attention_mass, int8_rows
from kvswap_torch.tuning.samples import Sample

GROUPS = (1, 2, 4, 8, 16)
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
        Group size -> for each layer, rank -> recall of attention mass.
    best
        Group size -> for each layer what the best possible choice holds.
    recorded
        Group size -> one entry a sample.
    """

    tokens: int
    rank: int
    recall: dict[int, list[dict[int, float]]]
    best: dict[int, list[float]]
    recorded: dict[int, list[Recorded]]

    @property
    def groups(self) -> tuple[int, ...]:
        """Group sizes, rising."""
        return tuple(sorted(self.recorded))

    @property
    def middle_group(self) -> int:
        """The group size nearest to 4, where one has to stand for all."""
        return min(self.groups, key=lambda group: abs(group - 4))


class Recorder:
    """Observes samples; see `record_choices`."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        true_layers: Sequence[int],
        choice: Choice,
        groups: Sequence[int],
        ranks: Sequence[int],
        summary_dtype: str,
    ):
        self.pairs, self.true_layers, self.choice = pairs, frozenset(true_layers), choice
        self.groups, self.ranks, self.summary_dtype = tuple(groups), tuple(ranks), summary_dtype
        self.tokens = choice.group_tokens * choice.groups_max
        self.rank = self.ranks[len(self.ranks) // 2]
        empty = [dict.fromkeys(self.ranks, 0.0) for _ in pairs]
        self.sums = {group: [dict(layer) for layer in empty] for group in self.groups}
        self.best = {group: [0.0] * len(pairs) for group in self.groups}
        self.rows: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        self.rows = {group: [] for group in self.groups}

    def add(self, seen: Observed, sample: Sample) -> None:
        """One layer of a sample."""
        last = min(len(sample.ids), sample.focus + STEPS_MAX)
        positions = torch.arange(sample.focus, last)
        mass = attention_mass(seen.query[0][:, positions], seen.keys[0], seen.scale, positions)
        is_true = seen.layer in self.true_layers or seen.predicted is None
        look = (seen.query if is_true else seen.predicted)[:, :, positions]
        key, query = self.pairs[seen.layer]
        rows = flat_tokens(seen.keys).float() @ key
        low = sum_over_heads(look, seen.keys.shape[1]) @ query
        views = {group: Steps(seen, positions, self._choice(group), mass) for group in self.groups}
        for rank in self.ranks:
            kept = rows[:, :rank]
            kept = int8_rows(kept) if self.summary_dtype == "int8" else kept.to(seen.keys.dtype)
            scores = low[:, :rank] @ kept.float().T
            for group, steps in views.items():
                chosen = steps.select(scores)
                self.sums[group][seen.layer][rank] += steps.recall(chosen)
                if rank == self.rank:
                    self.rows[group].append(_rising(chosen, steps.choosable))
        for group, steps in views.items():
            self.best[group][seen.layer] += steps.best_recall()

    def _choice(self, group: int) -> Choice:
        return Choice(group, self.tokens // group, self.choice.sink_tokens, self.choice.tail_tokens)


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
    for number, sample in enumerate(samples):
        if progress is not None:
            progress("recording choices", number, len(samples))
        recorder.begin()
        calibrator.read(sample, lambda seen, sample=sample: recorder.add(seen, sample))
        for group, rows in recorder.rows.items():
            recorded[group].append(Recorded(sample.focus, tuple(rows)))
    if progress is not None:
        progress("recording choices", len(samples), len(samples))
    count = len(samples)
    recall = {
        group: [{rank: total / count for rank, total in layer.items()} for layer in layers]
        for group, layers in recorder.sums.items()
    }
    best = {group: [value / count for value in layers] for group, layers in recorder.best.items()}
    return Choices(recorder.tokens, recorder.rank, recall, best, recorded)


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
