"""A session whose steps a plug-in sees: `kvswap_torch.plug_ins.TokenScores.attended` at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvswap_torch.chunks import Pass
from kvswap_torch.config import SwapConfig
from kvswap_torch.hf.session import Session
from kvswap_torch.hf.token_notes import TokenNotes
from kvswap_torch.hf.valued_session import ValuedSession
from kvswap_torch.plug_ins import TokenScores, check_room, named


class AttendedSession(ValuedSession):
    """A `ValuedSession` that passes on what each token received of a step's attention.

    Parameters
    ----------
    session
        With keeper=given, opened to tell attention.
    plug_in, config
        As `ValuedSession`'s.
    room
        Bytes of the budget that were set aside for the plug-ins; None: there is no budget.
    nbytes
        What they keep of (sequences, tokens of each).
    """

    def __init__(
        self,
        session: Session,
        plug_in: TokenScores,
        config: SwapConfig,
        room: int | None,
        nbytes: Callable[[int, int], int],
    ):
        super().__init__(session, plug_in, config)
        self._room, self._nbytes = room, nbytes
        self._notes = TokenNotes(plug_in.notes)
        self._pass: Pass = "prefill"  # until it is said

    def begin_pass(self, kind: Pass, valid: torch.Tensor | None = None) -> None:
        self._session.begin_pass(kind, valid)
        self._pass = kind

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._check_room(layer, keys)
        super().append(layer, keys, values)

    def attend(self, layer: int, query: torch.Tensor, scale: float, *terms: Any) -> torch.Tensor:
        if not self._is_seen(layer):
            return super().attend(layer, query, scale, *terms)
        output, weights = self._session.attend_weighed(layer, query, scale, *terms)
        self._settle(layer, query)
        self._see(layer, weights, weights.shape[2] - query.shape[2])
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
        if self._is_seen(layer):
            self.append(layer, keys, values)
            return self.attend(layer, query, scale, *terms)
        self._check_room(layer, keys)
        return super().extend(layer, query, keys, values, scale, *terms)

    def crop(self, positions: int) -> None:
        super().crop(positions)
        self._notes.crop(positions)

    def select_sequences(self, indices: Sequence[int]) -> None:
        super().select_sequences(indices)
        self._notes.select_sequences(indices)

    def reset(self) -> None:
        super().reset()
        self._notes.reset()
        self._pass = "prefill"

    def _is_seen(self, layer: int) -> bool:
        return self._pass == "decode" and not self._config.is_exact(layer)

    def _see(self, layer: int, weights: torch.Tensor, began: int) -> None:
        """What it noted is kept once nothing can fail any more."""
        notes = self._notes.copy(layer, *weights.shape)
        size, tokens = notes.shape, weights.shape[2]
        with torch.no_grad(), named("token_scores", f"attended in layer {layer}"):
            worth = self._plug_in.attended(layer, weights, notes)
        if notes.shape != size:
            raise ValueError(
                f"token_scores: {type(self._plug_in).__name__} must write its notes of layer "
                f"{layer} in place, {list(size)}, got {list(notes.shape)}"
            )
        if worth is not None:
            now, decay = self._numbers(layer, worth, len(notes), tokens)
            self._session.replace_worth(layer, now, decay)
        self._notes.keep(layer, notes, began)

    def _check_room(self, layer: int, keys: torch.Tensor) -> None:
        what = f"token_scores: {type(self._plug_in).__name__} must note"
        tokens = self.positions(layer) + keys.shape[2]
        check_room(what, self._room, self._nbytes, len(keys), tokens)
