"""What a model calls the cache that it is given: since transformers 5.24 by another name.

Here alone, so that no call of ours depends on the release.
"""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """`cache` by the name that a model's ``forward()`` and ``generate()`` take it by.

    ::

        model(input_ids=ids, **cache_argument(model, cache))

    Parameters
    ----------
    model
        A transformers model or a part of one with a ``forward()`` of its own; wrappers of PEFT and
        ``torch.compile`` are looked into.
    cache
        Any cache, or None.

    Returns
    -------
    dict
        ``{"cache": cache}`` where the signature has it, else ``{"past_key_values": cache}``.
    """
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    takes_new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if takes_new else "past_key_values": cache}
