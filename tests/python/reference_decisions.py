"""What a cache decides by itself: the part of `ReferenceSession` around its selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

KEYS_READ_BACK = 2048  # newest keys that a late estimate looks at


class Decisions:
    """Whether to look ahead, and projections that are estimated where none was given."""

    kind = "prefill"  # of the pass

    def __init__(self, options: Any):
        self._options = options
        self._estimate: Callable[..., Any] | None = None
        self._estimated: dict[int, int] = {}  # of a layer: the positions that its estimate is above

    def set_estimate(self, estimate: Callable[..., Any]) -> None:
        self._estimate = estimate

    @property
    def prediction(self) -> str:
        """off, trust, or verify where there is something to predict, and a page to spare."""
        made = self._options
        shared = made.resident_layers is not None and made.resident_layers < made.layers
        has_room = shared or made.pages_max > made.groups_max
        if made.look_ahead == "verify" and (made.rows in ("none", "given") or not has_room):
            return "off"
        return made.look_ahead

    def wants_look_ahead(self, layer: int, tokens: int) -> int:
        """0: no; 1: with any query; 2: with a predicted one."""
        made = self._options
        is_of_use = (
            self.prediction != "off"
            and layer in range(made.layers)
            and layer not in made.true_query_layers
            and self.kind == "decode"
            and tokens <= made.select_queries_max
            and self.positions(layer) >= made.tail_tokens + made.group_tokens
        )
        if not is_of_use:
            return 0
        if self.attends_all(layer):
            return 1
        return 0 if self._is_exact(layer) else 2

    def read_ahead(self, layer: int, tokens: int) -> None:
        shape = (self.batch(), self._options.kv_heads, tokens, self._options.head_dim)
        self.look_ahead(layer, torch.zeros(shape))

    def _is_without(self, layer: int) -> bool:
        """No projection was given, and none of the tokens that are there was estimated."""
        is_given = layer in self._projections and layer not in self._estimated
        takes_one = bool(self._ranks) and not self._is_exact(layer)
        return takes_one and not is_given and self._estimated.get(layer, -1) < 0

    def _estimate_from_chunk(self, layer: int, query: torch.Tensor, keys: torch.Tensor) -> None:
        """Before a long chunk that leaves more groups than may be attended is stored."""
        made, tokens = self._options, keys.shape[2]
        held = self.positions(layer)
        groups = (held + tokens - made.tail_tokens) // made.group_tokens
        says_much = self.kind == "prefill" and tokens > made.select_queries_max
        if self._is_without(layer) and says_much and groups > made.groups_max:
            valid = self._declared.get(layer)
            self._put_estimate(layer, keys, query, valid, held)

    def _estimate_late(self, layer: int, tokens: int) -> None:
        """Decoding has outgrown what may be attended: the newest keys have to do."""
        says_much = self.kind == "prefill" and tokens > self._options.select_queries_max
        if says_much or not self.needs_projection(layer):
            return
        state, held = self._layers[layer], self.positions(layer)
        begin = max(0, held - KEYS_READ_BACK)
        keys, valid = state.keys[:, :, begin:].clone(), state.valid[:, begin:]
        self._put_estimate(layer, keys, None, valid, held - 1)

    def _put_estimate(self, layer: int, keys, query, valid, stands_above: int) -> None:
        if self._estimate is None:
            return
        told = None if valid is None or valid.all() else valid
        self.set_projection(layer, *self._estimate(layer, keys, query, told, self._ranks[layer]))
        self._estimated[layer] = stands_above

    def _forget_estimates(self, positions: int) -> None:
        """So many positions are left: what an estimate was made from may be gone."""
        for layer, above in self._estimated.items():
            if positions <= above:
                self._estimated[layer] = -1
