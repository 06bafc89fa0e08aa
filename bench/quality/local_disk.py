"""Measures this machine's disk, for the "local" among modelled devices.

    python -m bench.quality.local_disk

Writes bench/results/disk_local.json: four numbers fitted to random reads of many sizes.
"""

from __future__ import annotations

from pathlib import Path

from bench import machine
from bench.quality.disk import LOCAL
from kvswap_torch.tuning.disk import DiskModel
from kvswap_torch.tuning.probe import probe_disk

SECONDS = 20.0
FOLDER = Path("build")


def main() -> None:
    figures = probe_disk(FOLDER, seconds=SECONDS)
    facts = machine.describe(FOLDER) | {"command": "python -m bench.quality.local_disk"}
    told = {"reader": figures.reader, "direct": figures.direct, "warnings": list(figures.warnings)}
    path = machine.write(
        LOCAL.stem, {"machine": facts, "model": DiskModel.fit(figures).to_json()} | told
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
