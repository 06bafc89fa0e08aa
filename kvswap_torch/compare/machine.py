"""What a measurement was made on, for the results that it is written with."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def facts(path: str | Path) -> dict[str, Any]:
    """Processor, memory, disk and versions; no names of people, hosts or folders."""
    import torch

    from kvswap_torch import _C, __version__
    from kvswap_torch.hf.full_cache import TRANSFORMERS

    disk = dict(_C.system_info(str(path)))
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "file_system": _file_system(Path(path)),
        "direct": disk.get("takes_direct"),
        "simd": disk["simd"],
        "versions": {
            "kvswap_torch": __version__,
            "torch": torch.__version__,
            "transformers": TRANSFORMERS,
            "python": platform.python_version(),
        },
        "load_average": os.getloadavg()[0],
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(path: Path) -> str:
    best, kind = "", "?"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if str(path.resolve()).startswith(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind
