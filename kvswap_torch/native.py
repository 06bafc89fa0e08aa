"""The compiled part: where it is, what it was built with, and whether it fits this torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

PACKAGE_DIR = Path(__file__).resolve().parent
LIBRARY = PACKAGE_DIR / "lib" / "libkvswap_torch.so"


def build_info() -> dict[str, Any] | None:
    """What the libraries were built with; None in a source tree that was not built.

    Keys: ``torch`` (version), ``liburing``, ``highway``, ``xxhash``, ``json``, ``cuda`` (0 or 1),
    ``build_type``.
    """
    try:
        return json.loads((PACKAGE_DIR / "lib" / "build_info.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def torch_version() -> str:
    """The installed torch's version, without importing it where its metadata tells."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        try:
            import torch
        except ImportError as error:
            raise ImportError(
                "kvswap_torch: needs torch, which is not installed here; install it first, then "
                "kvswap_torch with --no-build-isolation"
            ) from error
        return str(torch.__version__)


def check_torch() -> None:
    """Refuses a torch other than the one the libraries were built for.

    The local part of the version (``+cpu``) may differ: the libraries use what all builds of one
    release share, and those built for CUDA what all builds with CUDA share.

    Raises
    ------
    ImportError
        Naming both versions and what to do.
    """
    info = build_info()
    if info is None:
        return
    installed = torch_version()
    remedy = (
        "install that torch, or build kvswap_torch again for this one (pip install "
        "--no-build-isolation --force-reinstall --no-deps . in the source folder; with its own "
        "environment: make clean build)"
    )
    if installed.split("+")[0] != str(info["torch"]).split("+")[0]:
        raise ImportError(
            f"kvswap_torch: was built for torch {info['torch']}, but torch {installed} is "
            f"installed; {remedy}"
        )
    if info.get("cuda") and not torch_has_cuda():
        raise ImportError(
            f"kvswap_torch: was built for torch {info['torch']} with CUDA, but torch {installed} "
            f"without it is installed; {remedy}"
        )


def torch_has_cuda() -> bool:
    """Whether the installed torch has its CUDA part; imports nothing."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return any((Path(place) / "lib" / "libc10_cuda.so").is_file() for place in places or ())


def require_library() -> Path:
    """The path of libkvswap_torch.so, for ``torch.ops.load_library``.

    Raises
    ------
    ImportError
        When it was not built.
    """
    if not LIBRARY.is_file():
        raise ImportError(
            f"kvswap_torch: {LIBRARY} must exist and does not; in a checkout run: make build"
        )
    return LIBRARY


def cache_options(**fields: Any) -> Any:
    """A `kvswap_torch._C.CacheOptions` with these fields, settings beside the others."""
    from kvswap_torch import _C

    options = _C.CacheOptions()
    for name, value in fields.items():
        setattr(options, name, value)
    return options
