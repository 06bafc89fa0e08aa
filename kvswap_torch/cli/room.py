"""Whether a model's weights can be in this process's memory at all, before they are loaded.

Weights that stay as their files have them are mapped: the kernel drops pages and reads them again,
so that a model larger than memory answers, slowly. What cannot be dropped must fit: weights that
are converted or put in few bits, and of mapped ones the layer that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvswap_torch.errors import ConfigError
from kvswap_torch.few_bits import BITS
from kvswap_torch.machine_memory import MemoryLimit, memory_limit
from kvswap_torch.memory_size import format_bytes

# In fp32 a weight of a half precision takes twice its bytes in the file.
MOST_GROWTH = 2


def check_room(
    name: str,
    dtype: str,
    weights: str | None,
    weights_memory: int | None,
    load_config: Callable[[str], Any],
) -> None:
    """Compares a folder's weights with the lowest limit of this process's memory.

    Parameters
    ----------
    name
        Of the model's folder; a name in the hub or a GGUF file is not looked at.
    dtype, weights, weights_memory
        As `load_model` takes them.
    load_config
        Loads the model's config; called where the weights are not small beside the limit.

    Raises
    ------
    ConfigError
        They cannot fit; says the bytes, which limit, and what would need less.
    """
    from kvswap_torch.hf.unloaded import (
        computed_dtype,
        stored_bytes,
        stored_weights,
        unloaded_model,
        weight_bytes,
    )

    limit = memory_limit()
    stored = stored_bytes(name) if Path(name).is_dir() else None
    if stored is None or MOST_GROWTH * stored <= limit.limit_bytes:
        return
    config = load_config(name)
    if getattr(config, "quantization_config", None) is not None:
        return  # what its library makes of the files is not known here
    kind = computed_dtype(name, config, dtype, weights)
    model = unloaded_model(config, kind, weights)
    total = weight_bytes(model)
    is_mapped = all(each.dtype in (kind, None) for each in stored_weights(name).values())
    if weights_memory is not None and weights_memory < total:
        needed, how = weights_memory, "give less to --weights-memory"
    elif weights in BITS or not is_mapped:
        less = "give --weights-memory, or " if weights_memory is None else ""
        needed, how = total, f"{less}see kvswap fit"
    else:
        needed, how = _largest_layer(model), "see kvswap fit"
    if needed > limit.limit_bytes + limit.swap_bytes:
        raise _too_large(name, needed, limit, how)


def _largest_layer(model: Any) -> int:
    import torch

    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.unloaded import weight_bytes

    layers = model_parts(model, torch.device("cpu")).layers
    return max(weight_bytes(layer) for layer in layers)


def _too_large(name: str, needed: int, limit: MemoryLimit, how: str) -> ConfigError:
    swap = f" and {format_bytes(limit.swap_bytes)} of swap" if limit.swap_bytes else ""
    return ConfigError(
        f"--model: its weights must fit in memory, and {name} needs {format_bytes(needed)} of it "
        f"at once, more than {limit.what}, {format_bytes(limit.limit_bytes)}{swap}; {how}"
    )
