"""``kvswap cmake-prefix``: where CMake finds what pip, or ``make build`` of a clone, has built."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from kvswap_torch.native import PACKAGE_DIR

BUILD = Path("build") / "dev"  # of a clone


def prefix() -> Path:
    """The folder for ``CMAKE_PREFIX_PATH``.

    A clone's build is installed below its own folder first, with torch beside it as in
    site-packages.

    Raises
    ------
    ImportError
        Neither pip nor ``make build`` has put anything there.
    """
    folder = PACKAGE_DIR / "share" / "cmake"
    if (folder / "kvswap").is_dir():
        return folder
    build = PACKAGE_DIR.parent / BUILD
    if not (build / "cmake_install.cmake").is_file():
        raise ImportError(
            f"cmake-prefix: {folder} must exist and does not; install the package with pip, or "
            "build this clone with: make build"
        )
    installed = build / "installed" / "kvswap_torch"
    _install(build, installed)
    return installed / "share" / "cmake"


def _install(build: Path, target: Path) -> None:
    """What a wheel has of it, and a link to torch where a wheel has its neighbour."""
    command = ["cmake", "--install", str(build), "--prefix", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ImportError(f"cmake-prefix: cmake must be on PATH, and is not ({error})") from error
    if done.returncode:
        told = done.stderr.strip().splitlines() or ["no word"]
        raise ImportError(
            f"cmake-prefix: the build in {build} must be whole, and is not ({told[-1].strip()}); "
            "run: make build"
        )
    found = importlib.util.find_spec("torch")
    torch = target.parent / "torch"
    if found is not None and found.origin is not None:
        torch.unlink(missing_ok=True)
        torch.symlink_to(Path(found.origin).parent)
