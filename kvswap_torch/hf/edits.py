"""What calls that change a whole cache are given, checked before anything changes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


def chosen_sequences(where: str, indices: Any, batch: int, *, takes_mask: bool) -> list[int]:
    """Their numbers.

    Parameters
    ----------
    indices
        ``[n]`` integers, negative ones counted from the end; or a ``[batch]`` mask.
    batch
        Sequences in the cache; 0: it is empty, where every number is one.

    Raises
    ------
    ValueError
        For anything else, a sequence that is not there, or none at all.
    """
    wanted = "numbers of sequences" + (" or a mask over the batch" if takes_mask else "")
    try:
        chosen = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: must be given {wanted}, got {indices!r}") from error
    is_mask = chosen.dtype == torch.bool
    if chosen.shape == (0,):  # an empty list is one of floats
        chosen = chosen.long()
    if chosen.dim() != 1 or chosen.is_floating_point() or chosen.is_complex():
        raise ValueError(
            f"{where}: must be given {wanted}, [n], got {list(chosen.shape)} of {chosen.dtype}"
        )
    if is_mask and not takes_mask:
        raise ValueError(f"{where}: must be given {wanted}, got a mask")
    if is_mask and batch and len(chosen) != batch:
        raise ValueError(f"{where}: a mask must be over {batch} sequences, got {len(chosen)}")
    if is_mask:
        chosen = chosen.nonzero().flatten()
    if len(chosen) == 0:
        raise ValueError(f"{where}: one sequence at least must stay; reset() empties the cache")
    numbers = chosen.tolist()
    for number in numbers:
        if batch and not -batch <= number < batch:
            raise ValueError(f"{where}: sequences must be {-batch}..{batch - 1}, got {number}")
    return [number + batch if number < 0 else number for number in numbers]


def check_repeats(repeats: Any) -> int:
    """How often each sequence goes on.

    Raises
    ------
    ValueError
        For less than once.
    """
    times = _integer(repeats)
    if times is None or times < 1:
        raise ValueError(
            f"batch_repeat_interleave: repeats must be an integer of at least 1, got {repeats!r}"
        )
    return times


def check_removed(tokens: Any) -> int:
    """Tokens to remove from the end, as a negative number or 0.

    Raises
    ------
    ValueError
        For anything but an integer of at most 0: a positive one once meant the length to keep.
    """
    removed = _integer(tokens)
    if removed is None or removed > 0:
        raise ValueError(
            "crop: must be given a negative integer, of tokens to remove, got "
            f"{tokens!r}; to keep n tokens pass n - cache.get_seq_length()"
        )
    return removed


def forget(layer: Any) -> None:
    """Empties a layer of transformers' own.

    Its ``reset()`` alone does that since 5.18. Before, it wrote zeros to the keys and values, and
    the next update was appended to them.
    """
    layer.reset()
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        layer.keys = layer.values = None
        layer.is_initialized = False
    if getattr(layer, "is_indexer_initialized", False):
        layer.indexer_keys = None
        layer.is_indexer_initialized = False


def _integer(value: Any) -> int | None:
    """An integer of any kind: assisted decoding of transformers 5.17 has it in a tensor."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None
