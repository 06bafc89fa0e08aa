"""What a model is calibrated on: tokens, and from where on they are decoded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

TOKENS_MIN = 64  # below it there is nothing to choose from


@dataclass(frozen=True)
class Sample:
    """A document and what follows it.

    Parameters
    ----------
    ids
        ``[tokens]`` int64.
    focus
        The first token that would be decoded with selection on: a question, an answer. Attention
        recall is measured from here to the end.
    """

    ids: torch.Tensor
    focus: int

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.ids.dtype != torch.int64:
            raise ValueError(
                f"sample: ids must be a [tokens] int64 tensor, got {self.ids.dtype} "
                f"{list(self.ids.shape)}"
            )
        if not 0 < self.focus < len(self.ids):
            raise ValueError(
                f"sample: focus must lie inside the {len(self.ids)} tokens, after at least one "
                f"that is only read, got {self.focus}"
            )


def windows(ids: torch.Tensor, tokens: int, decoded: int) -> Iterable[Sample]:
    """Cuts a long plain text into samples whose last `decoded` tokens are in focus.

    Parameters
    ----------
    ids
        ``[n]`` int64; a remainder shorter than half of `tokens` is left out.
    tokens
        Length of a sample; memory is bounded by it, not by the text's length.

    Raises
    ------
    ValueError
        When the text is too short for one sample, or `decoded` leaves nothing to read.
    """
    if not 0 < decoded < tokens:
        raise ValueError(f"windows: decoded must be 1 to {tokens - 1}, got {decoded}")
    pieces = [piece for piece in ids.split(tokens) if 2 * len(piece) >= tokens]
    if not pieces or len(pieces[0]) <= max(decoded, TOKENS_MIN):
        raise ValueError(
            f"windows: the text must have more than {max(decoded, TOKENS_MIN)} and at least "
            f"{(tokens + 1) // 2} tokens, got {len(ids)}; give a longer text, or shorter samples"
        )
    return [
        Sample(piece, len(piece) - decoded)
        for piece in pieces
        if len(piece) > max(decoded, TOKENS_MIN)
    ]
