"""A KV cache that lives on disk, for Hugging Face ``generate()`` and LibTorch programs.

>>> from kvswap_torch import KVSwapCache
>>> with KVSwapCache(model, path="/fast/disk") as cache:  # doctest: +SKIP
...     out = model.generate(**inputs, **cache.as_argument(), max_new_tokens=200)
...     print(cache.stats())

Importing this package starts nothing, patches nothing and imports neither torch nor transformers:
what needs them is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from kvswap_torch.config import ModelIdentity, Solution, SwapConfig
from kvswap_torch.errors import (
    BudgetError,
    ClosedError,
    ConfigError,
    CorruptionError,
    KVSwapError,
    RankError,
    StorageError,
    UnsupportedModelError,
)
from kvswap_torch.memory_size import format_bytes, parse_bytes
from kvswap_torch.native import check_torch
from kvswap_torch.preset import presets
from kvswap_torch.process_memory import ProcessMemory, give_back_memory
from kvswap_torch.version import __version__

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache

__all__ = [
    "BudgetError",
    "ClosedError",
    "ConfigError",
    "CorruptionError",
    "KVSwapCache",
    "KVSwapError",
    "ModelIdentity",
    "ProcessMemory",
    "RankError",
    "Solution",
    "StorageError",
    "SwapConfig",
    "UnsupportedModelError",
    "__version__",
    "format_bytes",
    "give_back_memory",
    "parse_bytes",
    "presets",
]

_LAZY = {"KVSwapCache": "kvswap_torch.hf.cache"}

# Silent unless the program says otherwise; what is logged is in docs/troubleshooting.md.
logging.getLogger(__name__).addHandler(logging.NullHandler())

# A library that this torch lacks something for fails later with a bare undefined symbol.
check_torch()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
