"""How many tokens a model was made for, and a warning where a cache holds more."""

from __future__ import annotations

import warnings
from typing import Any

#: What helps where more tokens are wanted than a model was made for.
REMEDY = (
    "scale its positions knowingly: rope_parameters in the model's config.json with a rope_type "
    "such as yarn"
)


def most_positions(config: Any) -> int | None:
    """Tokens that a model was made for, by its (text) config.

    None where it does not say, or where RoPE stretches positions: then somebody meant it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models say it for each kind of layer.
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if any(part.get("rope_type", "default") != "default" for part in kinds):
        return None
    return getattr(config, "max_position_embeddings", None)


class Reach:
    """Of one cache: warns once that it holds more tokens than its model was made for.

    Transformers' own caches go on in silence, and answers become nonsense.
    """

    def __init__(self, config: Any):
        self._most = most_positions(config)

    def note(self, tokens: int) -> None:
        """So many are in the cache now, padding included."""
        if self._most is None or tokens <= self._most:
            return
        most, self._most = self._most, None
        warnings.warn(
            f"KVSwapCache: holds {tokens:,} tokens, and the model was made for {most:,}; what it "
            f"says of more is not to be trusted. {REMEDY[0].upper()}{REMEDY[1:]}",
            RuntimeWarning,
            stacklevel=2,
        )
