"""What a measurement was made on, for the results that stand in the project."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe(path: str | Path) -> dict[str, Any]:
    """Processor, memory, disk and versions; no names of people, hosts or folders."""
    import torch
    import transformers

    from kvswap_torch import _C, __version__

    disk = dict(_C.system_info(str(path)))
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "bench", _name(), *sys.argv[1:]]),
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
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "load_average": os.getloadavg()[0],
    }


def memory_bytes(kinds: Sequence[str] = ("RssAnon",), pid: int | str = "self") -> int:
    """Memory of a process now, as the kernel counts it under these names of its status file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[kind].split()[0]) << 10 for kind in kinds)


def write(name: str, results: dict[str, Any]) -> Path:
    """bench/results/<name>.json."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    return path


def _name() -> str:
    main = Path(sys.argv[0]).resolve()
    # A package is run by its __main__.py.
    return main.parent.name if main.stem == "__main__" else main.stem


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
