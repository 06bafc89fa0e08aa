"""Which tokens a cache holds: what forward passes were given, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class TokenLog:
    """``[batch, positions]`` token ids, as long as every pass was given ids.

    A pass calls `begin` and, once it is whole, `commit`, so that one that failed leaves no trace.
    After a pass over embeddings alone, the ids are not known until `reset`, or
    until nothing is left.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []  # [batch, tokens] each, on the host
        self._begun: torch.Tensor | None = None
        self.is_known = True

    def begin(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward pass is about to run with these arguments."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        is_ids = isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point()
        self._begun = ids if is_ids else None

    def commit(self, positions: int) -> None:
        """The pass has run; the cache holds `positions` positions now."""
        begun, self._begun = self._begun, None
        new = positions - self.positions
        if new == 0 or not self.is_known:
            return
        if begun is None or begun.shape[1] != new:
            self._pieces, self.is_known = [], False
            return
        self._pieces.append(begun.detach().to("cpu", torch.int64, copy=True))
        if len(self._pieces) > 64:
            self._pieces = [torch.cat(self._pieces, 1)]

    @property
    def positions(self) -> int:
        return sum(piece.shape[1] for piece in self._pieces)

    @property
    def ids(self) -> torch.Tensor | None:
        """None where they are not known, or there are none."""
        if not self._pieces:
            return None
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces, 1)]
        return self._pieces[0]

    @ids.setter
    def ids(self, ids: torch.Tensor | None) -> None:
        self._pieces = [] if ids is None else [ids.clone()]
        self.is_known = ids is not None

    def crop(self, positions: int) -> None:
        if positions == 0:
            self._pieces, self.is_known = [], True
        elif self._pieces and positions < self.positions:
            self._pieces = [self.ids[:, :positions]]

    def select(self, indices: Sequence[int]) -> None:
        if self._pieces:
            self._pieces = [self.ids[torch.as_tensor(indices, dtype=torch.long)]]

    def reset(self) -> None:
        self._pieces, self._begun, self.is_known = [], None, True
