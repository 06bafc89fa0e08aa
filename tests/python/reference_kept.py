"""What `ReferenceKeeper` knows of one layer and sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Kept:
    """Of one layer and sequence."""

    positions: set[int] = field(default_factory=set)
    mass: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    decay: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    queries_since: int = 0
    is_staggered: bool = False  # `queries_since` began where that of others did not
    seen: int = 0  # positions whose queries have counted
    is_due: bool = False
    due_from: int = 0  # positions; a step that is made again had no turn before it
    due_begin: int = -1  # of the chunk that made it due; -1: steps did
    # Of the time before that chunk.
    before: tuple[int | None, list[int] | None, float | None, bool] = (None, None, None, False)
    begins_anew: bool = False  # what is paid next is the first of `mass`
    excluded: set[int] = field(default_factory=set)  # that rows of groups leave out
    joined: int = 0  # positions before here had their chance to join
    stay: list[int] | None = None  # who stays if there is no room, the best first
    # Of `positions`, those in e4m3: K and V [kv_heads, head_dim].
    rounded: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    quality: float | None = None
    overlap: float | None = None
    spread: tuple[float, float] | None = None  # CAKE's
    candidates: int = 0
    ranked: list[int] = field(default_factory=list)  # of `positions`, the best first
    chosen: list[int] | None = None  # not kept yet, the best first
    # Of the newest long chunk, or with keep_scores=disk the newest of all: queries
    # [heads, n, head_dim], the first one's position, and their log-sum-exps [heads, n] or None.
    window: tuple[torch.Tensor, int, torch.Tensor | None] | None = None

    def grow(self, positions: int) -> None:
        missing = max(0, positions - len(self.mass))
        self.mass = torch.nn.functional.pad(self.mass, (0, missing))

    def note_chunk(self, begin: int) -> None:
        pending = self.due_from if self.is_due and self.due_begin < 0 else None
        self.before = (pending, self.stay, self.overlap, self.begins_anew)
        self.begins_anew = True
        self.is_due, self.due_from, self.due_begin = True, 0, begin
        self.stay = self.overlap = None

    def count_queries(self, fresh: int, interval: int) -> None:
        self.queries_since += fresh
        if not self.is_due and 0 < interval <= self.queries_since:
            self.is_due, self.due_from, self.due_begin = True, self.seen, -1

    def pay(self, paid: torch.Tensor) -> None:
        """Float [positions]."""
        if self.begins_anew:
            self.mass, self.begins_anew = torch.zeros(0), False
        self.grow(len(paid))
        self.mass[: len(paid)] += paid

    def crop(self, sealed: int, positions: int, step: int) -> None:
        self.positions = {position for position in self.positions if position < sealed}
        self.excluded = {position for position in self.excluded if position < sealed}
        self.joined = min(self.joined, sealed)
        self.ranked = [position for position in self.ranked if position < sealed]
        if self.is_due and positions <= self.due_begin and self.positions:
            pending, self.stay, self.overlap, self.begins_anew = self.before
            self.window, self.chosen, self.due_begin = None, None, -1
            self.is_due, self.due_from = pending is not None, pending or 0
        if positions == 0:
            self.spread, self.window, self.is_due = None, None, False
        self.rounded = {position: kv for position, kv in self.rounded.items() if position < sealed}
        if self.stay is not None:
            self.stay = [position for position in self.stay if position < sealed]
        if self.seen - positions > step:  # less may be a step that is made again
            self.mass, self.decay = self.mass[:positions], self.decay[:positions]
            self.seen, self.due_from = positions, min(self.due_from, positions)
        if self.window is not None and self.window[2] is None:
            self.window = _until(self.window, positions)

    def take_queries(self, query: torch.Tensor, first_position: int, most: int) -> None:
        """Decoded ones, ``[heads, n, head_dim]``."""
        old = None if self.window is None else _until(self.window, first_position)
        if old is not None and old[1] + old[0].shape[1] == first_position:
            first_position, query = old[1], torch.cat([old[0], query], 1)
        first_position += max(0, query.shape[1] - most)
        self.window = (query[:, -most:], first_position, None)

    def whole_groups(self, group: int) -> set[int]:
        groups = {position // group for position in self.positions}
        return {g for g in groups if self.positions >= set(range(g * group, (g + 1) * group))}


def _until(window: Any, positions: int) -> Any:
    """A window without the queries that stand there or later; None: there is none left."""
    query, first_position, _ = window
    return (
        (query[:, : positions - first_position], first_position, None)
        if positions > first_position
        else None
    )
