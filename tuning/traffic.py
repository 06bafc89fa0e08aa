"""What a step reads from the disk with given settings: recorded choices, replayed and merged.

The engine's own reuse buffer (KVSwap, section 3.4.3 and appendix A.1), run over recorded choices:
no disk, no timing, only who is there and who leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.engine import engine_value
from kvswap_torch.tuning.choices import BLOCK_TOKENS, Choices, stretched
from kvswap_torch.tuning.step_model import Disk

POLICIES = ("fifo", "lru", "unused")
NO_REUSE = "none"  # every step reads all that it attends


class ReuseBuffer:
    """The pages of one layer and sequence, replaced by the engine's own rule.

    Parameters
    ----------
    capacity
        Groups kept; at least as many as one step chooses.
    policy
        Who leaves, as `SwapConfig.replacement`: one of `POLICIES`, or `NO_REUSE`.
    """

    def __init__(self, capacity: int, policy: str):
        from kvswap_torch import _C

        if policy not in (*POLICIES, NO_REUSE):
            raise ValueError(f"reuse buffer: policy must be one of {POLICIES}, got {policy!r}")
        if capacity < 1:
            raise ValueError(f"reuse buffer: capacity must be positive, got {capacity}")
        self._capacity = capacity
        self._pages = _C.PageMap(capacity, policy)

    def __contains__(self, group: int) -> bool:
        return self._pages.holds(group)

    def plan(self, wanted: np.ndarray) -> np.ndarray:
        """One step's choice, ``[groups]`` without repeats; returns which of it was loaded."""
        if len(wanted) > self._capacity:
            raise ValueError(
                f"reuse buffer: capacity must be at least the {len(wanted)} groups of a step, got "
                f"{self._capacity}"
            )
        return wanted[self._pages.plan(wanted)]


@dataclass(frozen=True)
class Traffic:
    """Of one layer, sequence and step, on average.

    Parameters
    ----------
    attended, loads
        Groups chosen, and of them not in memory.
    reads, bytes_read
        What is asked of the disk, neighbours merged, gaps included.
    """

    attended: float
    loads: float
    reads: float
    bytes_read: float

    @property
    def hit_rate(self) -> float:
        return 1 - self.loads / self.attended if self.attended else 0.0

    def scaled(self, share: float) -> Traffic:
        """Of so many times the groups."""
        own = (self.attended, self.loads, self.reads, self.bytes_read)
        return Traffic(*(share * each for each in own))


@dataclass(frozen=True)
class Prefetched:
    """What a layer reads whose prediction is verified: before it selects, and once it has."""

    early: Traffic
    late: Traffic

    def scaled(self, share: float) -> Prefetched:
        return Prefetched(self.early.scaled(share), self.late.scaled(share))


@dataclass(frozen=True)
class Merging:
    """As `SwapConfig`: neighbours over a gap up to the first, reads up to the second."""

    record_bytes: int
    gap_bytes: int
    bytes_max: int


UNMERGED = Merging(4096, 0, 4096)


def read_sizes(places: Sequence[int] | np.ndarray, merging: Merging) -> list[int]:
    """Bytes of each read that fetches the records that stand at these places of the file.

    Merged by the engine's own rule (csrc/io/read_coalescing.h).
    """
    from kvswap_torch import _C

    sizes = (merging.record_bytes, merging.gap_bytes, merging.bytes_max)
    return _C.merged_read_bytes(np.asarray(places, dtype=np.int64), *sizes)


Steps = list[np.ndarray]
"""Of one layer and sequence: the groups of each step, rising."""


class TrafficTable:
    """Replays of recorded choices, each made once."""

    def __init__(self, choices: Choices):
        self.choices = choices
        self._steps: dict[tuple[int, int, bool], list[list[Steps]]] = {}
        self._known: dict[tuple, list[Traffic]] = {}
        self._prefetched: dict[tuple, list[Prefetched | None]] = {}

    def get(
        self, group: int, pages: int, policy: str, context: int, merging: Merging
    ) -> list[Traffic]:
        """For each layer what it reads; the steps in which an empty buffer fills do not count.

        Parameters
        ----------
        pages
            Groups kept per layer and sequence.
        context
            Tokens to imagine the recorded choices in.
        """
        key = (group, pages, policy, context, merging)
        if key not in self._known:
            self._known[key] = [
                _mean([_replay(steps, pages, policy, merging) for steps in layer])
                for layer in self.steps(group, context)
            ]
        return self._known[key]

    def reuse(self, group: int, pages: int, policy: str, context: int) -> list[Traffic]:
        """The same where only who is there matters, and not how reads are merged."""
        return self.get(group, pages, policy, context, UNMERGED)

    def prefetched(
        self, group: int, pages: int, policy: str, context: int, merging: Merging
    ) -> list[Prefetched | None]:
        """The same where a predicted query prefetches and the true query selects.

        None for a layer that nothing is predicted of, or without a page to spare.
        """
        key = (group, pages, policy, context, merging)
        if key not in self._prefetched:
            if group not in self.choices.ahead:
                return [None] * len(self.choices.recorded[group][0].layers)
            layers = zip(
                self.steps(group, context), self.steps(group, context, ahead=True), strict=True
            )
            self._prefetched[key] = [
                _mean_prefetched(
                    [
                        _replay_prefetched(steps, guesses, pages, policy, merging)
                        for steps, guesses in zip(*samples, strict=True)
                    ]
                )
                for samples in layers
            ]
        return self._prefetched[key]

    def steps(self, group: int, context: int, *, ahead: bool = False) -> list[list[Steps]]:
        """For each layer and recorded sample its steps, as they would be in that context.

        ahead: what the predicted queries select.
        """
        if (group, context, ahead) not in self._steps:
            recorded = (self.choices.ahead if ahead else self.choices.recorded)[group]
            self._steps[group, context, ahead] = [
                [
                    [
                        stretched(each.chosen(layer, step), group, each.context, context)
                        for step in range(each.steps)
                    ]
                    for each in recorded
                ]
                for layer in range(len(recorded[0].layers))
            ]
        return self._steps[group, context, ahead]


class Replayed:
    """Recorded choices as overrides of a session's, each sequence somewhere else in them.

    Called with the number of a step; gives the groups of each layer and sequence.

    Parameters
    ----------
    groups_max
        Of a step; None: all that were recorded. Those left out are of the same blocks of the text
        in every step, so that as large a part is chosen again, and neighbours stay neighbours.
    """

    def __init__(
        self,
        table: TrafficTable,
        group_tokens: int,
        context: int,
        batch: int,
        groups_max: int | None = None,
    ):
        self._layers = table.steps(group_tokens, context)
        self._batch = batch
        self._group_tokens, self._groups_max = group_tokens, groups_max

    def __call__(self, step: int) -> list[list[list[int]]]:
        return [
            [self._chosen(samples, sequence, step) for sequence in range(self._batch)]
            for samples in self._layers
        ]

    def _chosen(self, samples: list[Steps], sequence: int, step: int) -> list[int]:
        steps = samples[sequence % len(samples)]
        groups = steps[(step + 11 * (sequence // len(samples))) % len(steps)]
        blocks = groups * self._group_tokens // BLOCK_TOKENS
        mixed = np.argsort(blocks * 2654435761 % 2**32, kind="stable")  # multiplicative hashing
        return np.sort(groups[mixed[: self._groups_max]]).tolist()


def _replay(steps: Steps, pages: int, policy: str, merging: Merging) -> Traffic:
    buffer = ReuseBuffer(pages, policy)
    attended = loads = reads = total = counted = 0
    for number, groups in enumerate(steps):
        loaded = buffer.plan(groups)
        if number < len(steps) // 4:
            continue
        sizes = read_sizes(loaded, merging)
        attended, loads = attended + len(groups), loads + len(loaded)
        reads, total, counted = reads + len(sizes), total + sum(sizes), counted + 1
    each = 1 / max(1, counted)
    return Traffic(attended * each, loads * each, reads * each, total * each)


def _replay_prefetched(
    steps: Steps, guesses: Steps, pages: int, policy: str, merging: Merging
) -> Prefetched | None:
    """Pages that were prefetched in vain do not stay here: as little is found again."""
    if not any(len(guess) for guess in guesses):
        return None
    buffer = ReuseBuffer(pages, policy)
    early, late = [0.0] * 4, [0.0] * 4
    counted = 0
    for number, (groups, guess) in enumerate(zip(steps, guesses, strict=True)):
        room = pages - len(groups)
        wanted = np.array([each for each in guess if each not in buffer][:room], dtype=np.int64)
        loaded = buffer.plan(groups)
        if number < len(steps) // 4:
            continue
        counted += 1
        missed = np.setdiff1d(loaded, wanted)
        for sums, read in ((early, wanted), (late, missed)):
            sizes = read_sizes(read, merging)
            for place, value in enumerate((len(groups), len(read), len(sizes), sum(sizes))):
                sums[place] += value
    if early[1] == 0:
        return None
    each = 1 / max(1, counted)
    return Prefetched(Traffic(*early).scaled(each), Traffic(*late).scaled(each))


def _mean_prefetched(found: Sequence[Prefetched | None]) -> Prefetched | None:
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return Prefetched(_mean([each.early for each in known]), _mean([each.late for each in known]))


def _mean(traffic: Sequence[Traffic]) -> Traffic:
    count = len(traffic)
    return Traffic(
        sum(each.attended for each in traffic) / count,
        sum(each.loads for each in traffic) / count,
        sum(each.reads for each in traffic) / count,
        sum(each.bytes_read for each in traffic) / count,
    )


REPLACEMENT_GAIN_MIN = 0.02  # of what is loaded
GAPS = (0, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)  # bytes
GAP_GAIN_MIN = 0.02  # of the time that reading takes


def pick_replacement(traffic: TrafficTable, context: int) -> str:
    """Who leaves the reuse buffer: the policy that finds most; the paper's where it finds as much.

    Judged with twice as much kept as is attended.
    """
    group = traffic.choices.middle_group
    pages = 2 * traffic.choices.tokens // group
    loads = {
        policy: sum(each.loads for each in traffic.reuse(group, pages, policy, context))
        for policy in POLICIES
    }
    best = min(POLICIES, key=loads.__getitem__)
    return best if loads[best] < (1 - REPLACEMENT_GAIN_MIN) * loads["fifo"] else "fifo"


def pick_merge_gap(
    traffic: TrafficTable, disk: Disk, config: SwapConfig, token_bytes: int, context: int
) -> int:
    """Over how many bytes that nobody wants a read goes on: bytes against what a request costs.

    The gap with which the recorded choices are read fastest, judged as in `pick_replacement`; that
    of `config` where it is as fast. A gap takes as much memory once.

    Parameters
    ----------
    token_bytes
        Of a token in one layer, keys and values of all KV heads.
    """
    group = traffic.choices.middle_group
    pages = 2 * traffic.choices.tokens // group
    policy = engine_value(config, "replacement")

    def seconds(gap: int) -> float:
        merging = Merging(group * token_bytes, gap, config.storage.max_read_bytes)
        layers = traffic.get(group, pages, policy, context, merging)
        return sum(
            disk.seconds(each.reads, each.bytes_read / each.reads) for each in layers if each.reads
        )

    usual = config.storage.coalesce_gap_bytes
    times = {gap: seconds(gap) for gap in sorted({usual, *GAPS})}
    best = min(times, key=times.__getitem__)
    return best if times[best] < (1 - GAP_GAIN_MIN) * times[usual] else usual
