"""``generate()`` over a cache that it opens and closes by itself."""

from __future__ import annotations

from typing import Any

from kvswap_torch.config import SwapConfig

CACHES = ("cache", "past_key_values")
DEFAULT_NEW_TOKENS = 20  # of generate()


def generate(
    model: Any,
    *,
    kv_path: str | None = ".",
    kv_memory_bytes: int | str | None = None,
    max_context: int | None = None,
    config: SwapConfig | str | None = None,
    preset: str | None = None,
    keep: float | None = None,
    **arguments: Any,
) -> Any:
    """``model.generate(**arguments)`` with the KV cache on disk.

    Parameters
    ----------
    model
        As for `KVSwapCache`.
    kv_path
        The folder on the disk to use; this one if not said.
    kv_memory_bytes, config, preset, keep
        As for `KVSwapCache`.
    max_context
        Tokens to be ready for. If not given, and there is a budget to divide: the prompt's and the
        new ones.
    arguments
        ``generate()``'s.

    Returns
    -------
    What ``generate()`` returns; of ``return_dict_in_generate`` without the cache, which is closed.

    Raises
    ------
    ValueError
        A cache is among the arguments.
    """
    from kvswap_torch import KVSwapCache

    given = [name for name in CACHES if arguments.pop(name, None) is not None]
    if given:
        raise ValueError(
            f"generate: {given[0]} must not be given, since this opens a cache of its own; call "
            "model.generate() without custom_generate"
        )
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if kv_memory_bytes is not None and max_context is None:
        max_context = expected_tokens(model, arguments)
    with KVSwapCache(
        model, kv_path, config, kv_memory_bytes, max_context, preset=preset, keep=keep
    ) as cache:
        told = model.generate(**arguments, **cache.as_argument())
    for name in CACHES:
        if getattr(told, name, None) is not None:
            setattr(told, name, None)
    return told


def expected_tokens(model: Any, arguments: dict[str, Any]) -> int | None:
    """Of a prompt and its answer, as far as the arguments say; else None."""
    ids = arguments.get("input_ids", arguments.get("inputs"))
    if ids is None or ids.ndim != 2:
        return None
    prompt = ids.shape[1]
    told = arguments.get("generation_config") or model.generation_config
    for settings in (arguments, vars(told)):
        if settings.get("max_new_tokens") is not None:
            return prompt + settings["max_new_tokens"]
        if settings is arguments and settings.get("max_length") is not None:
            return settings["max_length"]
    # generate() takes the model's length for all of the text, and its own for an answer.
    return max(getattr(told, "max_length", None) or 0, prompt + DEFAULT_NEW_TOKENS)
