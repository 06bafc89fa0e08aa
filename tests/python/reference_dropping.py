"""Turns, and what is gone after them: the part of `ReferenceSession` without a disk."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvswap_torch.errors import KVSwapError


class Dropping:
    """Without a directory tokens are gone once they are neither kept, sinks nor new."""

    _options: Any
    _keeper: Any
    _layers: dict[int, Any]

    @property
    def _drops(self) -> bool:
        options = self._options
        return not options.directory and options.rows == "none" and options.keeper != "none"

    def _let_go(self, state: Any) -> None:
        """Of what has had its turn, but for the newest positions, which a crop may ask for."""
        options = self._options
        newest = self._sealed_at(state.positions - 2 * options.select_queries_max)
        for sequence, kept in enumerate(state.kept if self._drops else []):
            then = copy.copy(state)
            then.sealed = min(state.sealed, newest)
            if self._keeper.is_on and (options.keep_interval > 0 or self._keeper.joins):
                then.sealed = min(then.sealed, kept.joined)
            if not kept.is_due and not self._fits(then, sequence):
                state.gone[sequence] = max(state.gone[sequence], then.sealed)
        self._stay_rounded(state)

    def _stay_rounded(self, state: Any) -> None:
        """What is left of a token in e4m3 is what that made of it."""
        for sequence, (kept, gone) in enumerate(zip(state.kept, state.gone, strict=True)):
            for position, (key, value) in kept.rounded.items():
                if position < gone:
                    state.keys[sequence, :, position] = key
                    state.values[sequence, :, position] = value

    def _dropped(self, state: Any) -> torch.Tensor:
        """bool [batch, positions]: neither there nor kept any more."""
        dropped = torch.zeros_like(state.valid)
        group = self._options.group_tokens
        for sequence, gone in enumerate(state.gone):
            dropped[sequence, :gone] = True
            dropped[sequence, sorted(state.kept[sequence].positions)] = False
            for sink in self._groups(state, sequence)[0]:
                dropped[sequence, sink * group : (sink + 1) * group] = False
        return dropped

    def _have_turn(self, state: Any) -> None:
        """Before a later chunk, and at the end of a first one; not by queries that were cropped."""
        ends = (kept.window[1] + kept.window[0].shape[1] for kept in state.kept if kept.window)
        if self._drops and max(ends, default=0) <= state.positions:
            self._turn(state, state.positions)
            self._let_go(state)

    def _crop_gone(self, positions: int) -> None:
        sealed, states = self._sealed_at(positions), self._layers.values()
        if any(0 < positions < state.positions and sealed < max(state.gone) for state in states):
            raise KVSwapError(f"crop: must not reach what is gone, got {positions}")
        for state in states:
            state.gone = [min(gone, sealed) for gone in state.gone]

    def _turn_of_layers(self, state: Any, position: int) -> None:
        """All layers that are due, together; of all KV heads."""
        if not self._has_turn(state, position):
            return
        for keeper in self._keeper.siblings:
            for other in keeper.states.values():
                valid, due = other.valid, self._has_turn(other, position)
                other.valid = valid & ~self._dropped(other)
                for sequence in due:
                    sinks = self._groups(other, sequence)[0]
                    keeper.choose(other, sequence, sinks, self._scale)
                other.valid = valid
        layers = [i for i in range(self._options.layers) if not self._is_exact(i)]
        for sequence in range(len(state.kept)):
            self._keeper.divide(sequence, len(layers))

    def _has_turn(self, state: Any, position: int) -> list[int]:
        """Sequences."""
        return [
            sequence
            for sequence, kept in enumerate(state.kept)
            if kept.is_due and position >= kept.due_from and not self._fits(state, sequence)
        ]

    def _turn(self, state: Any, position: int) -> None:
        if self._keeper.prefers_layers:
            return self._turn_of_layers(state, position)
        valid = state.valid
        there = valid & ~self._dropped(state)
        for sequence, kept in enumerate(state.kept):
            is_due = kept.is_due and position >= kept.due_from
            if self._fits(state, sequence):
                continue
            sinks = self._groups(state, sequence)[0]
            state.valid = there  # for whom the others are padding
            if is_due:
                self._keeper.turn(state, sequence, sinks, self._scale)
                kept.joined = state.sealed
            elif self._keeper.joins:
                self._keeper.join(state, sequence, sinks, self._layers.values())
            state.valid = valid
        self._stay_rounded(state)
