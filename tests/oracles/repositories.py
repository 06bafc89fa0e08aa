"""Files of checked-out repositories as modules, and what is told of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

CACHES = "transformers.cache_utils"


def module_at(path: Path, **beside: types.ModuleType) -> Any:
    """A published file as a module; `beside`: what it imports and does not need here."""
    sys.modules.update(beside)
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None, f"{path}: no such file"
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def cache_at(path: Path, **beside: types.ModuleType) -> Any:
    """As `module_at`, of a file that derives its cache from those of some transformers."""
    caches, known = types.ModuleType(CACHES), sys.modules.get(CACHES)
    for name in ("DynamicCache", "Cache", "HybridCache", "CacheLayerMixin"):
        setattr(caches, name, type(name, (), {"__init__": lambda self: None}))
    code = module_at(path, **{CACHES: caches, **beside})
    if known is not None:
        sys.modules[CACHES] = known
    return code


def head_of(folder: Path) -> str:
    told = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


def versions_of(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in names}
