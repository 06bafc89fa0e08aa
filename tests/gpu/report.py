"""What each CUDA kernel takes on each architecture, from what ptxas said: ``make cuda-report``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build" / "core" / "cuda"
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def readable(names: list[str]) -> dict[str, str]:
    """Mangled names -> ``attend_tensor<BFloat16, 2>``, as far as c++filt is there."""
    try:
        done = subprocess.run(["c++filt", *names], text=True, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}
    lines = done.stdout.splitlines()
    short = [re.sub(r"kvswap::cuda::|\(anonymous namespace\)::|^void ", "", x) for x in lines]
    short = [re.sub(r"\(\w+\)(?=\d)", "", x) for x in short]  # the type of an integer argument
    return dict(zip(names, [line.split("(")[0] for line in short], strict=True))


def read(path: Path) -> list[tuple[str, str, int, int, int]]:
    """(mangled name, architecture, registers, shared bytes, spilled bytes) of each kernel."""
    rows = []
    name = architecture = ""
    spilled = 0
    for line in path.read_text().splitlines():
        if entry := ENTRY.search(line):
            name, architecture = entry.groups()
        elif spills := SPILLS.search(line):
            spilled = int(spills[2]) + int(spills[3])
        elif (used := USED.search(line)) and name:
            rows.append((name, architecture, int(used[1]), int(used[2] or 0), spilled))
            name = ""
    return rows


def main() -> int:
    rows = [row for path in sorted(BUILD.glob("*.ptxas")) for row in read(path)]
    if not rows:
        print(f"cuda-report: nothing in {BUILD}; make cuda-compile needs nvcc")
        return 0
    names = readable(sorted({row[0] for row in rows}))
    kernels: dict[tuple[str, str], tuple[int, int, int]] = {}
    for name, architecture, registers, shared, spilled in rows:
        kernels[names[name], architecture] = (registers, shared, spilled)
    architectures = sorted({architecture for _, architecture in kernels})
    width = max(len(name) for name, _ in kernels)
    print(f"{'kernel':{width}}" + "".join(f"  {a}: regs  smem spill" for a in architectures))
    for name in sorted({name for name, _ in kernels}):
        print(f"{name:{width}}" + "".join(
            "  {:>11}{:>6}{:>6}".format(*kernels.get((name, a), ("-", "-", "-")))
            for a in architectures))  # fmt: skip
    spilling = sum(spilled > 0 for _, _, spilled in kernels.values())
    print(f"{len(kernels)} kernels, {spilling} of them spill registers")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
