"""What a `TokenScores` notes of each token: numbers that follow what happens to the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class _Noted:
    """Of one layer: ``[batch, kv_heads, tokens, width]``; `before` the newest step, which began
    with so many tokens, as well."""

    now: torch.Tensor
    before: torch.Tensor | None = None
    began: int = 0


class TokenNotes:
    """Numbers for each token and KV head of each layer, 0 until they are written.

    A step that is taken back has noted nothing: a crop to where it began, or before, restores what
    stood before it. Of a crop within it, or further back, tokens are cut and the others stay.

    Parameters
    ----------
    width
        Numbers, fp32.
    """

    def __init__(self, width: int):
        self._width = width
        self._layers: dict[int, _Noted] = {}

    def copy(self, layer: int, batch: int, kv_heads: int, tokens: int) -> torch.Tensor:
        """What is noted, for so many tokens, to be written on and handed to `keep`."""
        size = (batch, kv_heads, tokens, self._width)
        fresh = torch.zeros(size, dtype=torch.float32, device="cpu")
        if layer in self._layers:
            now = self._layers[layer].now
            fresh[:, :, : now.shape[2]] = now
        return fresh

    def keep(self, layer: int, notes: torch.Tensor, began: int) -> None:
        """They are noted, by a step that `began` tokens were there before."""
        known = self._layers.get(layer)
        self._layers[layer] = _Noted(notes, None if known is None else known.now, began)

    def crop(self, tokens: int) -> None:
        for layer, noted in list(self._layers.items()):
            if tokens <= noted.began:
                if noted.before is None:
                    del self._layers[layer]
                    continue
                self._layers[layer] = noted = _Noted(noted.before, began=-1)
            if noted.now.shape[2] > tokens:
                noted.now = noted.now[:, :, :tokens].clone()

    def select_sequences(self, indices: Sequence[int]) -> None:
        for noted in self._layers.values():
            noted.now = noted.now[list(indices)]
            if noted.before is not None:
                noted.before = noted.before[list(indices)]

    def reset(self) -> None:
        self._layers.clear()
