"""Which tokens stay: the part of `ReferenceSession` that `SwapConfig.keeper` decides."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.python.reference_division import Division
from tests.python.reference_methods.arkv import in_dtype_of, layer_quality, token_worth
from tests.python.reference_methods.observed import (
    agreement,
    attention_weights,
    by_mass,
    log_sum_exp,
    most_attended,
)
from tests.python.reference_methods.shadowkv import outlier_worth
from tests.reference import float8_rounded


class ReferenceKeeper(Division):
    """Turns, and what happens between them."""

    def __init__(self, options: Any, fits: Callable[[Any, int], bool]):
        self._options = options
        self._needs_no_choice = fits  # may all of a sequence be attended?
        self.states: dict[int, Any] = {}  # [layer]
        self.softcap = 0.0  # of the newest attention, as the next
        self.head_sinks: torch.Tensor | None = None  # [heads]
        self._is_given = options.keeper == "given"
        self.is_on = options.keeper in (*("observed", "heavy", "arkv", "cake"), "outliers", "given")
        self.prefers_layers = options.keeper == "cake"
        self.joins = options.keeper == "arkv"
        self._sums_up = options.keeper == "heavy"
        self.siblings = [self]  # of the other KV heads, with heads=each
        self._reads_disk = options.keep_scores == "disk"

    def observe_chunk(self, state, query, log_sum_exp) -> None:
        """After a long chunk: query [batch, heads, n, head_dim], log_sum_exp [batch, heads, n]."""
        tokens = query.shape[2]
        if self._options.keeper == "outliers":
            for kept in state.kept:
                kept.note_chunk(state.positions - tokens)
                kept.seen = state.positions
            return
        for sequence, kept in enumerate([] if self._is_given else state.kept):
            valid = state.came[sequence].nonzero().flatten()
            first = int(valid[0]) if len(valid) else state.positions
            counted = min(tokens, state.positions - first, self._options.keep_window)
            if counted > 0:
                newest = slice(-counted, None)
                kept.window = (
                    query[sequence, :, newest],
                    state.positions - counted,
                    log_sum_exp[sequence, :, newest],
                )
                kept.note_chunk(state.positions - counted)
                kept.seen = state.positions

    def give_worth(self, state, worth: torch.Tensor, decay: torch.Tensor | None) -> None:
        """Of the newest tokens: ``[batch, tokens]``."""
        tokens, interval = worth.shape[1], self._options.keep_interval
        for sequence, kept in enumerate(state.kept):
            first = state.positions - tokens
            lost = torch.zeros_like(worth) if decay is None else decay
            kept.mass = torch.cat([kept.mass[:first], worth[sequence]])
            kept.decay = torch.cat([kept.decay[:first], lost[sequence]])
            fresh = min(tokens, max(0, state.positions - kept.seen))
            kept.seen = max(kept.seen, state.positions)
            if first < state.prefilled:
                kept.note_chunk(first)
            else:
                kept.count_queries(fresh, interval)

    def turn(self, state, sequence: int, sinks: list[int], scale: float) -> None:
        kept, group = state.kept[sequence], self._options.group_tokens
        if self.joins:
            return self._turn_after_prompt(state, sequence, sinks, scale)
        if self._is_given:
            age = state.positions - torch.arange(state.sealed)
            worth = kept.mass[: state.sealed] - age * kept.decay[: state.sealed]
            may_stay = state.valid[sequence, : state.sealed].clone()
            for sink in sinks:
                may_stay[sink * group : (sink + 1) * group] = False
            chosen = most_attended(worth, may_stay, self._options.keep_tokens, 1, -torch.inf)
            kept.positions = set(chosen.tolist())
            kept.queries_since, kept.is_due = 0, False
            return
        if self._options.keeper == "outliers":
            valid = state.valid[sequence, : state.sealed]
            worth = outlier_worth(state.keys[sequence, :, : state.sealed], valid, group)
            may_stay = self._may_stay(state, sequence, sinks, 0, state.sealed)
            most = self._options.keep_tokens // group * group
            worth = worth.repeat_interleave(group)
            kept.positions = set(most_attended(worth, may_stay, most, 1, -torch.inf).tolist())
            kept.is_due = False
            return
        since = kept.queries_since % self._options.keep_interval if self._reads_disk else 0
        if self._reads_disk and kept.window is None:
            kept.queries_since, kept.is_due = since, False
            return
        most = self._options.keep_tokens
        if self._options.keep_share == "auto":
            most = self._share(state, sequence, scale)
        layer = next(i for i, each in self.states.items() if each is state)
        if self._options.keep_layer_shares:
            most = self.share_of_layer(layer)
        if kept.window is not None:
            query, first_position, sums = kept.window
            sums = self._sums(state, sequence, scale) if sums is None else sums
            kept.begins_anew |= self._reads_disk
            end = state.positions if self._sums_up else state.sealed
            keys = state.keys[sequence, :, :end]
            weights = attention_weights(keys, query, first_position, sums, scale, self.softcap)
            kept.pay(weights[self._asked(layer)].sum(1).mean(0) * state.valid[sequence, :end])
        kept.grow(state.sealed)
        may_stay = state.valid[sequence, : len(kept.mass)].clone()
        may_stay[state.sealed :] = False
        for sink in sinks:
            may_stay[sink * group : (sink + 1) * group] = False
        pool = 1 if self._sums_up else self._options.keep_pool
        kept.positions = set(most_attended(kept.mass, may_stay, most, pool).tolist())
        if self._options.exclude_from_summary:
            self._exclude(state, sequence)
        kept.mass = kept.mass if self._sums_up else torch.zeros_like(kept.mass)
        kept.queries_since, kept.is_due = since, False
        kept.window = (*kept.window[:2], None) if self._reads_disk else None

    def _exclude(self, state, sequence: int) -> None:
        """Rows of groups that changed are made of their records, without what is kept."""
        kept, group = state.kept[sequence], self._options.group_tokens
        for g in {position // group for position in kept.positions ^ kept.excluded}:
            tokens = slice(g * group, (g + 1) * group)
            state.scored[sequence, :, tokens] = state.keys[sequence, :, tokens]
            state.rowed[sequence, tokens] = state.valid[sequence, tokens]
        kept.excluded = set(kept.positions)

    def _sums(self, state, sequence: int, scale: float) -> torch.Tensor:
        """Of what the window's queries see: [heads, queries]."""
        query, first_position, _ = state.kept[sequence].window
        all_keys, valid = state.keys[sequence], state.valid[sequence]
        sums = log_sum_exp(all_keys, valid, query, first_position, scale, self.softcap)
        if self.head_sinks is None:
            return sums
        return torch.logaddexp(sums, self.head_sinks[:, None])

    def _share(self, state, sequence: int, scale: float) -> int:
        """Tokens that stay, as many in all heads."""
        layer = next(i for i, each in self.states.items() if each is state)
        options, overlaps = self._options, []
        for sibling in self.siblings:
            kept = sibling.states[layer].kept[sequence]
            if kept.overlap is None and kept.window is not None:
                kept.overlap = sibling.overlap(sibling.states[layer], sequence, scale)
            usual = 0.25 * options.groups_max * options.group_tokens
            overlaps.append(usual if kept.overlap is None else kept.overlap)
        groups = math.floor(sum(overlaps) / len(overlaps) / options.group_tokens)
        return min(groups, options.keep_tokens // options.group_tokens) * options.group_tokens

    def overlap(self, state, sequence: int, scale: float) -> float:
        """Of the window's first and last query."""
        query, first_position, sums = state.kept[sequence].window
        sums = self._sums(state, sequence, scale) if sums is None else sums
        keys = state.keys[sequence, :, : state.sealed]
        weights = attention_weights(keys, query, first_position, sums, scale, self.softcap)
        before = min(first_position, state.sealed)
        weights = weights[:, :, :before][:, :, state.valid[sequence, :before]]
        return agreement(weights, self._options.groups_max * self._options.group_tokens)

    def _may_stay(self, state, sequence: int, sinks: list[int], begin: int, end: int):
        """bool [end]"""
        may_stay, group = state.valid[sequence, :end].clone(), self._options.group_tokens
        may_stay[:begin] = False
        for sink in sinks:
            may_stay[sink * group : (sink + 1) * group] = False
        return may_stay

    def _newcomers(self, *which: Any) -> list[int]:
        """The newest, where there are more than there is room for."""
        positions = self._may_stay(*which).nonzero().flatten().tolist()
        return positions[-self._options.keep_tokens :]

    def _turn_after_prompt(self, state, sequence: int, sinks: list[int], scale: float) -> None:
        kept, options = state.kept[sequence], self._options
        observed = min(state.sealed, kept.window[1] + kept.window[0].shape[1])
        keys = state.keys[sequence, :, : state.sealed]
        weights = attention_weights(keys, *kept.window, scale, self.softcap)
        worth = token_worth(weights, len(keys), options.keep_variance)
        worth = worth * state.valid[sequence, : state.sealed]
        fresh = self._newcomers(state, sequence, sinks, observed, state.sealed)
        may_stay = self._may_stay(state, sequence, sinks, 0, state.sealed)
        may_stay[observed:] = False
        room = options.keep_tokens - len(fresh)
        chosen = most_attended(worth, may_stay, room, options.keep_pool).tolist()
        kept.positions, kept.rounded = {*chosen, *fresh}, {}
        if options.keep_ratio is None:
            before = min(kept.window[1], state.sealed)
            is_valid = state.valid[sequence, :before]
            paid = weights[:, :, :before].sum((0, 1))[is_valid]
            kept.quality = layer_quality(paid, options.keep_temperatures)
        kept.window, kept.stay, kept.is_due, kept.joined = None, None, False, state.sealed

    def _fit(self, in_dtype: int, in_float8: int) -> bool:
        is_bytes = self._options.keep_count == "bytes"
        each = self._options.dtype.itemsize if is_bytes else 1
        return in_dtype + math.ceil(in_float8 / each) <= self._options.keep_tokens

    def join(self, state, sequence: int, sinks: list[int], layers: Any) -> None:
        """What was sealed since is kept, where there is no room in the place of some that are."""
        kept = state.kept[sequence]
        fresh = self._newcomers(state, sequence, sinks, kept.joined, state.sealed)
        in_dtype = len(kept.positions) - len(kept.rounded)
        if not self._fit(in_dtype + len(fresh), len(kept.rounded)):
            self._make_room(state, sequence, len(fresh), self._ratio(state, sequence, layers))
        kept.positions |= set(fresh)
        kept.joined, kept.stay = state.sealed, None

    def _ratio(self, state, sequence: int, layers: Any) -> float:
        """Of a layer's kept tokens that stay in the model's dtype."""
        own = state.kept[sequence].quality
        if self._options.keep_ratio is not None or own is None:
            return 1.0 if self._options.keep_ratio is None else self._options.keep_ratio
        most = max(layer.kept[sequence].quality or 0.0 for layer in layers)
        return own / most if most > 0 else 1.0

    def _make_room(self, state, sequence: int, fresh: int, ratio: float) -> None:
        kept = state.kept[sequence]
        most = in_dtype_of(ratio, self._options.keep_tokens)
        in_dtype: list[int] = []
        in_float8: list[int] = []
        for position in sorted(kept.positions) if kept.stay is None else kept.stay:
            is_float8 = len(in_dtype) >= most or position in kept.rounded
            more = (0, 1) if is_float8 else (1, 0)
            if not self._fit(len(in_dtype) + fresh + more[0], len(in_float8) + more[1]):
                break
            (in_float8 if is_float8 else in_dtype).append(position)
        kept.rounded = self._rounded(state, sequence, sorted(in_float8))
        kept.positions = {*in_dtype, *in_float8}

    def _rounded(self, state, sequence: int, positions: list[int]) -> dict:
        """In pages of a group's tokens, which share an exponent of each KV head and side."""
        rounded = {}
        kept, group = state.kept[sequence], self._options.group_tokens
        for first in range(0, len(positions), group):
            page = positions[first : first + group]
            sides = [
                float8_rounded(
                    torch.stack(
                        [
                            kept.rounded[position][side]
                            if position in kept.rounded
                            else (state.keys, state.values)[side][sequence, :, position]
                            for position in page
                        ],
                        1,
                    )
                )
                for side in (0, 1)
            ]
            rounded |= {
                position: (sides[0][:, i], sides[1][:, i]) for i, position in enumerate(page)
            }
        return rounded

    def observe_kept(self, state, sequence: int, sinks: list[int], weights) -> None:
        """After a step that nothing is sealed of yet: weights [heads, queries, positions]."""
        kept, options = state.kept[sequence], self._options
        kept.stay = None
        if kept.is_due or not kept.positions:
            return
        fresh = self._newcomers(state, sequence, sinks, kept.joined, state.sealed)
        in_dtype = len(kept.positions) - len(kept.rounded)
        if self._fit(in_dtype + len(fresh), len(kept.rounded)):
            return
        is_kept = torch.zeros(state.positions, dtype=torch.bool)
        is_kept[sorted(kept.positions)] = True
        worth = token_worth(weights, state.keys.shape[1], options.keep_variance) * is_kept
        stay = math.floor(options.keep_slack * len(kept.positions))
        kept.stay = by_mass(worth, is_kept, options.keep_pool, -torch.inf)[:stay].tolist()

    def _stagger(self, state, sequence: int) -> int:
        """Queries that count before there are any: turns are spread over the interval."""
        heads, batch = len(self.siblings), len(state.kept)
        head = next(i for i, each in enumerate(self.siblings) if each is self)
        layer = next(i for i, each in self.states.items() if each is state)
        number = (layer * batch + sequence) * heads + head
        return self._options.keep_interval * number // (self._options.layers * batch * heads)

    def observe_step(self, state, weights, query) -> None:
        """After a step: weights [batch, heads, queries, positions], query as in attend()."""
        interval = self._options.keep_interval
        is_counted = interval and not self._is_given and not self.joins
        for sequence, kept in enumerate(state.kept if is_counted else []):
            fresh = min(weights.shape[2], max(0, state.positions - kept.seen))
            is_observed = (
                self._sums_up or kept.queries_since + self._options.keep_window >= interval
            )
            if self._reads_disk and not kept.is_staggered:
                kept.queries_since = self._stagger(state, sequence)
                kept.is_staggered = True
            kept.seen = max(kept.seen, state.positions)
            kept.count_queries(fresh, interval)
            if self._reads_disk:
                first, most = state.positions - query.shape[2], self._options.keep_window
                kept.take_queries(query[sequence], first, most)
            elif is_observed and fresh > 0:
                kept.pay(fresh * weights[sequence, ..., : state.positions].mean((0, 1)))
            # While everything fits a choice is put off.
            is_turn = not self._sums_up and 0 < interval <= kept.queries_since
            if is_turn and not self._reads_disk and self._needs_no_choice(state, sequence):
                kept.queries_since, kept.begins_anew = 0, True
                kept.window = kept.window if self._options.keep_share == "auto" else None


def as_kept(state: Any) -> Any:
    """A layer with those in e4m3 as they are."""
    if not any(kept.rounded for kept in state.kept):
        return state
    seen = copy.copy(state)
    seen.keys, seen.values = state.keys.clone(), state.values.clone()
    for sequence, kept in enumerate(state.kept):
        for position, (key, value) in kept.rounded.items():
            seen.keys[sequence, :, position] = key
            seen.values[sequence, :, position] = value
    return seen
