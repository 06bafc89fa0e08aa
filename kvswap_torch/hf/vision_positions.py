"""What vision models keep on themselves between passes: how far positions are from tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvswap_torch.hf.families import ModelParts

# Of configs: ids that stand in the place of what is no text.
_PLACEHOLDERS = tuple(
    f"{kind}_token_{word}" for kind in ("image", "video", "audio") for word in ("id", "index")
)


def deltas_of(parts: ModelParts) -> torch.Tensor | None:
    """``[batch, 1]`` on the host: what is added to a token's number to have its position.

    Of the text that the model read last, since transformers knows one at a time; None: the model
    has no such thing, or has read nothing.
    """
    deltas = getattr(_keeper(parts), "rope_deltas", None)
    return None if deltas is None else deltas.detach().cpu()


def restore_deltas(parts: ModelParts, deltas: torch.Tensor | None) -> None:
    """Lets the model go on from a text that had these."""
    keeper = _keeper(parts)
    if keeper is not None and deltas is not None:
        keeper.rope_deltas = deltas.to(parts.device)


def placeholders(parts: ModelParts) -> set[int]:
    """Token ids that images and the like stand for."""
    config = parts.outermost.config
    return {getattr(config, name) for name in _PLACEHOLDERS if hasattr(config, name)} - {None}


def _keeper(parts: ModelParts) -> Any:
    return next((each for each in parts.outermost.modules() if hasattr(each, "rope_deltas")), None)
