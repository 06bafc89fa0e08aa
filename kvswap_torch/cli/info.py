"""``kvswap info``: what this machine offers, and what was built."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvswap_torch.errors import StorageError
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.native import build_info, torch_version
from kvswap_torch.version import __version__


def gather(path: Path) -> dict[str, Any]:
    """Facts about the machine, the disk at `path` and the build, by name.

    Keys: ``kvswap_torch``, ``python``, ``torch``, ``transformers`` (None when missing),
    ``built_for_torch`` (None when not built), ``cuda`` (whether the build has it), ``path``,
    ``free_bytes``, ``memlock_bytes`` (None: unlimited), and what the compiled part tells
    (``system_info``): reader and why, O_DIRECT, SIMD level; ``bf16_products``: whether the
    processor multiplies such matrices by instructions of its own.

    Raises
    ------
    StorageError
        When `path` is not a directory.
    """
    if not path.is_dir():
        raise StorageError(f"info: --path must be an existing directory, got {path}")
    built = build_info()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts: dict[str, Any] = {
        "kvswap_torch": __version__,
        "python": platform.python_version(),
        "torch": torch_version(),
        "transformers": _version("transformers"),
        "built_for_torch": None if built is None else built["torch"],
        "cuda": bool(built and built.get("cuda")),
        "path": str(path.resolve()),
        "free_bytes": shutil.disk_usage(path).free,
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
    }
    return facts | _compiled_facts(path)


def _compiled_facts(path: Path) -> dict[str, Any]:
    try:
        # The module needs torch's libraries, which importing torch loads.
        import torch

        from kvswap_torch import _C
        from kvswap_torch.half_linear import has_products
    except ImportError as error:
        return {"compiled_part": f"missing ({error}); in a checkout run: make build"}
    told = dict(_C.system_info(str(path)))
    uring = told.pop("has_uring", False)
    why_not = told.pop("uring_problem", "")
    # Reported above already, or better.
    for name in ("path", "free_bytes", "locked_memory_bytes"):
        told.pop(name, None)
    facts = {
        "reader": "io_uring" if uring else "threads",
        "reader_why": "io_uring works here" if uring else f"no io_uring: {why_not}",
        "o_direct": told.pop("takes_direct", None),
        "simd": told.pop("simd", None),
        "bf16_products": has_products(torch.bfloat16),
    }
    return facts | {name: value for name, value in told.items() if value not in ("", None, [])}


def show(path: Path, as_json: bool, console: Console) -> None:
    """Prints `gather`'s facts as a table or as JSON."""
    facts = gather(path)
    if as_json:
        print(json.dumps(facts, indent=2, default=str))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _shown(name, value))
    console.print(table)


def _shown(name: str, value: Any) -> str:
    if name == "memlock_bytes" and value is None:
        return "unlimited"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
