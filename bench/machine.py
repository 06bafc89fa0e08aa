"""What a measurement was made on, for the results that stand in the project."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvswap_torch.compare.machine import facts

RESULTS = Path(__file__).parent / "results"


def describe(path: str | Path) -> dict[str, Any]:
    """Date, command, and the machine's `facts`."""
    command = shlex.join(["python", "-m", "bench", _name(), *sys.argv[1:]])
    return {"date": datetime.date.today().isoformat(), "command": command} | facts(path)


def memory_bytes(kinds: Sequence[str] = ("RssAnon",), pid: int | str = "self") -> int:
    """Memory of a process now, as the kernel counts it under these names of its status file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[kind].split()[0]) << 10 for kind in kinds)


def write(name: str, results: dict[str, Any]) -> Path:
    """bench/results/<name>.json; an absolute name is a path of its own."""
    path = RESULTS / f"{name.removesuffix('.json')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    return path


def _name() -> str:
    main = Path(sys.argv[0]).resolve()
    # A package is run by its __main__.py.
    return main.parent.name if main.stem == "__main__" else main.stem
