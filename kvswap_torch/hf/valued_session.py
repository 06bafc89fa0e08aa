"""A session that keeps the tokens somebody else values: `kvswap_torch.plug_ins.TokenScores`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvswap_torch.config import SwapConfig
from kvswap_torch.hf.session import Session, WrappedSession
from kvswap_torch.plug_ins import TokenScores, Worth, flat_numbers, named


class ValuedSession(WrappedSession):
    """Tells a session what each appended token is worth, once it has been attended.

    Parameters
    ----------
    session
        With keeper=given.
    plug_in
        Opened for the same settings.
    config
        The session's settings.
    """

    def __init__(self, session: Session, plug_in: TokenScores, config: SwapConfig):
        super().__init__(session)
        self._plug_in = plug_in
        self._config = config
        # Of a layer: the first position, keys and values of what nobody has attended yet.
        self._waiting: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def look_ahead(self, layer: int, query: torch.Tensor, *terms: Any) -> None:
        self._settle(layer)
        self._session.look_ahead(layer, query, *terms)

    def read_ahead(self, layer: int, tokens: int) -> None:
        self._settle(layer)
        self._session.read_ahead(layer, tokens)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._settle(layer)
        first = self._session.positions(layer)
        self._session.append(layer, keys, values)
        self._waiting[layer] = first, keys, values

    def attend(self, layer: int, query: torch.Tensor, scale: float, *terms: Any) -> torch.Tensor:
        output = self._session.attend(layer, query, scale, *terms)
        self._settle(layer, query)
        return output

    def extend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        *terms: Any,
    ) -> torch.Tensor:
        self._settle(layer)
        output = self._session.extend(layer, query, keys, values, scale, *terms)
        self._value(layer, query, keys, values)
        return output

    def crop(self, positions: int) -> None:
        self._session.crop(positions)
        for layer, (first, keys, values) in list(self._waiting.items()):
            left = max(0, positions - first)
            if left:
                self._waiting[layer] = first, keys[:, :, :left], values[:, :, :left]
            else:
                del self._waiting[layer]

    def select_sequences(self, indices: Sequence[int]) -> None:
        for layer in list(self._waiting):
            self._settle(layer)
        self._session.select_sequences(indices)

    def reset(self) -> None:
        self._waiting.clear()
        self._session.reset()

    def _settle(self, layer: int, query: torch.Tensor | None = None) -> None:
        """What was appended and not attended has no queries. It waits on where a plug-in raises."""
        if layer in self._waiting:
            self._value(layer, query, *self._waiting[layer][1:])
            del self._waiting[layer]

    def _value(
        self, layer: int, query: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        if self._config.is_exact(layer):
            return
        with torch.no_grad(), named("token_scores", f"worth in layer {layer}"):
            worth = self._plug_in.worth(layer, query, keys, values)
        self._session.give_worth(layer, *self._numbers(layer, worth, len(keys), keys.shape[2]))

    def _numbers(
        self, layer: int, worth: Any, batch: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What it said, checked, as the session takes it."""
        parts = (worth.now, worth.decay) if isinstance(worth, Worth) else (worth, None)
        what = (
            f"token_scores: {type(self._plug_in).__name__} must say what tokens of layer {layer} "
            "are worth by a Worth whose"
        )
        size = (batch, self._plug_in.shape.told_heads, (tokens,))
        now = flat_numbers(f"{what} now is", parts[0], *size)
        decay = None if parts[1] is None else flat_numbers(f"{what} decay is", parts[1], *size)
        return now, decay
