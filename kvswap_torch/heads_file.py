"""Files of what a model's heads and layers are worth, as CompressKV finds it out beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvswap_torch.errors import ConfigError

__all__ = ["read_heads"]

HEADS = 4  # of each layer, in the paper


def read_heads(path: str | Path, heads: int = HEADS) -> dict[str, tuple[Any, ...]]:
    """Settings that say which heads choose, and what layers are worth, from a file.

    Parameters
    ----------
    path
        JSON: ``{"heads": [[22, 4, 19, ...], ...], "layers": [0.015, ...]}``. For each layer on disk
        its query heads, the best first, and a number of any unit. ``heads`` may be an object with
        layers as names, as CompressKV's own files are. A list that does not name all heads of a
        layer needs ``"query_heads": N``, how many there are.
    heads
        Of each layer, the best ones.

    Returns
    -------
    dict
        `retention.scoring_heads` and `retention.layer_weights`, for `SwapConfig.preset`.

    Raises
    ------
    ConfigError
        Missing or corrupt, or naming what in it is wrong.
    """
    told = _json(Path(path))
    if not isinstance(told, dict) or not {"heads", "layers"} <= set(told):
        raise ConfigError(f"heads file {path}: must be an object with heads and layers")
    order = _lists(path, told["heads"])
    if not isinstance(told["layers"], list) or not all(map(_is_share, told["layers"])):
        raise ConfigError(
            f"heads file {path}: layers must be a list of numbers that are not negative"
        )
    if len(told["layers"]) != len(order):
        raise ConfigError(
            f"heads file {path}: layers must be as many as lists of heads ({len(order)}), got "
            f"{len(told['layers'])}"
        )
    count = told.get("query_heads", max(map(len, order), default=0))
    if not _is_number(count):
        raise ConfigError(f"heads file {path}: query_heads must be an int, got {count!r}")
    for layer, own in enumerate(order):
        is_distinct = len(set(own)) == len(own)
        if len(own) < heads or not is_distinct or not all(0 <= head < count for head in own):
            raise ConfigError(
                f"heads file {path}: layer {layer} must name at least {heads} different heads "
                f"below {count} (query_heads, or the longest list), got {own}"
            )
    best = sorted(layer * count + head for layer, own in enumerate(order) for head in own[:heads])
    return {
        "retention.scoring_heads": tuple(best),
        "retention.layer_weights": tuple(map(float, told["layers"])),
    }


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"heads file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"heads file {path}: must be JSON: {error}") from error


def _lists(path: str | Path, heads: Any) -> list[list[int]]:
    """Of layers, in their order."""
    if isinstance(heads, dict) and set(heads) == {str(layer) for layer in range(len(heads))}:
        heads = [heads[str(layer)] for layer in range(len(heads))]
    is_good = isinstance(heads, list) and all(
        isinstance(own, list) and all(map(_is_number, own)) for own in heads
    )
    if not is_good or not heads:
        raise ConfigError(
            f"heads file {path}: heads must be a list of numbers for each layer, or an object that "
            "has one for each of 0, 1, ..."
        )
    return heads


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return (_is_number(value) or isinstance(value, float)) and 0 <= value < float("inf")
