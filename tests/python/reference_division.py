"""How many tokens layers keep, where they differ: the part of `ReferenceKeeper` that says it."""

from __future__ import annotations

import math
from typing import Any

from tests.python.reference_methods import cake, compresskv
from tests.python.reference_methods.observed import attention_weights, by_mass


class Division:
    """CompressKV's shares, which stand in the settings, and CAKE's, which each prompt decides."""

    _options: Any
    _may_stay: Any
    states: dict[int, Any]
    siblings: list[Any]
    softcap: float

    def _asked(self, layer: int) -> list[int]:
        """Heads whose attention counts."""
        heads = range(self._options.query_heads)
        own = [number - layer * len(heads) for number in self._options.keep_heads]
        return [head for head in heads if head in own] or list(heads)

    def share_of_layer(self, layer: int) -> int:
        options = self._options
        given = (options.keep_layer_shares, options.keep_tokens, options.keep_layer_least)
        return compresskv.divide(*given, self.most_of_a_layer)[layer]

    @property
    def most_of_a_layer(self) -> int:
        options = self._options
        usual = options.keep_tokens + options.keep_window
        most = math.floor(options.keep_layer_most * usual) - options.keep_window
        return min(max(most, options.keep_tokens), options.keep_tokens * options.layers)

    def choose(self, state, sequence: int, sinks: list[int], scale: float) -> None:
        """Who may be kept, the best first, and how the prompt looked at this layer."""
        kept, options = state.kept[sequence], self._options
        keys, valid = state.keys[sequence, :, : state.sealed], state.valid[sequence, : state.sealed]
        weights = attention_weights(keys, *kept.window, scale, self.softcap) * valid
        kept.spread = cake.attention_spread(weights[:, :, : kept.window[1]])
        worth = cake.token_worth(weights, options.keep_variance)
        may_stay = self._may_stay(state, sequence, sinks, 0, state.sealed)
        order = by_mass(worth, may_stay, options.keep_pool)[: self.most_of_a_layer]
        kept.chosen, kept.candidates = order.tolist(), len(order)
        kept.window = None

    def divide(self, sequence: int, layers: int) -> None:
        """What was chosen is kept, as much of it as each of so many layers has."""
        weighed = [i for i, state in self.states.items() if state.kept[sequence].spread]
        preferences, limits = [], []
        for layer in weighed:
            of_heads = [keeper.states[layer].kept[sequence] for keeper in self.siblings]
            summed = (sum(part) for part in zip(*(kept.spread for kept in of_heads), strict=True))
            preferences.append(cake.preference(*summed, self._options.keep_preference))
            limits.append(max(kept.candidates for kept in of_heads))
        tokens = cake.divide(preferences, limits, layers * self._options.keep_tokens)
        for layer, count in zip(weighed, tokens, strict=True):
            for keeper in self.siblings:
                state = keeper.states[layer]
                kept = state.kept[sequence]
                if kept.chosen is not None:
                    kept.is_due, kept.queries_since, kept.joined = False, 0, state.sealed
                kept.ranked = (kept.ranked if kept.chosen is None else kept.chosen)[:count]
                kept.positions, kept.chosen = set(kept.ranked), None
