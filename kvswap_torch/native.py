"""The compiled part: where it is, what it was built with, and whether it fits this torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from kvswap_torch.elf_symbols import SharedLibrary

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
    """Refuses a torch that the libraries cannot be loaded with.

    That of the release that they were built for is taken, whatever its local part (``+cpu``): the
    libraries use what all builds of one release share, and those built for CUDA what all builds
    with CUDA share. A newer one is taken if it has every symbol that they need.

    Raises
    ------
    ImportError
        Naming both versions, what is missing and what to do.
    """
    info = build_info()
    if info is None:
        return
    installed, built = torch_version(), str(info["torch"])
    remedy = (
        "install that torch, or build kvswap_torch again for this one (pip install "
        "--no-build-isolation --force-reinstall --no-deps . in the source folder; with its own "
        "environment: make clean build)"
    )
    if installed.split("+")[0] != built.split("+")[0]:
        _check_another(built, installed, remedy)
    if info.get("cuda") and not torch_has_cuda():
        raise ImportError(
            f"kvswap_torch: was built for torch {built} with CUDA, but torch {installed} "
            f"without it is installed; {remedy}"
        )


def _check_another(built: str, installed: str, remedy: str) -> None:
    """A release that the libraries were not built for."""
    told = f"kvswap_torch: was built for torch {built}, but torch {installed} is installed"
    ours, theirs = (re.match(r"(\d+)\.(\d+)", version) for version in (built, installed))
    if ours is None or theirs is None or ours[1] != theirs[1] or int(theirs[2]) < int(ours[2]):
        raise ImportError(f"{told}; {remedy}")
    try:
        needed, lacking = _torch_symbols()
    except (OSError, ValueError) as error:
        raise ImportError(f"{told}, whose symbols cannot be read ({error}); {remedy}") from error
    if lacking:
        raise ImportError(
            f"{told}, which lacks {len(lacking)} of the {needed} symbols that the libraries need, "
            f"the first of them {lacking[0]}; {remedy}"
        )


def _torch_symbols() -> tuple[int, list[str]]:
    """How many symbols our libraries need of torch, and those that the installed one lacks."""
    ours = [LIBRARY, *sorted(PACKAGE_DIR.glob("_C*.so"))]
    theirs = [path for place in _torch_places() for path in sorted((place / "lib").glob("lib*.so"))]
    needed: dict[str, None] = {}
    for path in ours:
        with SharedLibrary(path) as library:
            needed |= dict.fromkeys(library.needed())
    # Python's own have no version either; the interpreter that runs this has them.
    needed = {name: None for name in needed if not name.startswith(("Py", "_Py"))}
    for path in ours:
        with SharedLibrary(path) as library:
            needed = {name: None for name in needed if not library.has(name)}
    lacking = list(needed)
    for path in theirs:
        if lacking and path.name.startswith(("libtorch", "libc10")):
            with SharedLibrary(path) as library:
                lacking = [name for name in lacking if not library.has(name)]
    return len(needed), lacking


def _torch_places() -> list[Path]:
    """Where the installed torch is; imports nothing."""
    spec = importlib.util.find_spec("torch")
    return [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]


def torch_has_cuda() -> bool:
    """Whether the installed torch has its CUDA part; imports nothing."""
    return any((place / "lib" / "libc10_cuda.so").is_file() for place in _torch_places())


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
