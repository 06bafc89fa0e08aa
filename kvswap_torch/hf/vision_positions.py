"""What vision models keep on themselves between passes: how far positions are from tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvswap_torch.hf.families import ModelParts

# Of configs: ids that stand in the place of what is no text.
_PLACEHOLDERS = tuple(
    f"{kind}_token_{word}" for kind in ("image", "video", "audio") for word in ("id", "index")
)


class VisionPositions:
    """One cache's: what is added to a token's number to have its position after images.

    transformers knows that of one text at a time, the one that the model has read last.

    Attributes
    ----------
    deltas
        ``[batch, 1]``; None: the model has no such thing, or no pass has been whole.
    """

    def __init__(self, parts: ModelParts):
        modules = parts.outermost.modules()
        self._keeper = next((each for each in modules if hasattr(each, "rope_deltas")), None)
        self.deltas: torch.Tensor | None = None

    def note(self) -> None:
        """A pass with the cache has run."""
        if self._keeper is not None:
            self.deltas = self._keeper.rope_deltas

    def restore(self, deltas: torch.Tensor | None, device: torch.device) -> None:
        """The cache, and its model with it, goes on from a text that had these."""
        if self._keeper is not None and deltas is not None:
            self.deltas = self._keeper.rope_deltas = deltas.to(device)


def placeholders(parts: ModelParts) -> set[int]:
    """Token ids that images and the like stand for."""
    config = parts.outermost.config
    return {getattr(config, name) for name in _PLACEHOLDERS if hasattr(config, name)} - {None}
