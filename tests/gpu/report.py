"""What each CUDA kernel takes on each architecture: ``make cuda-report``.

Registers, shared memory and spills are ptxas's own words. From them come the warps that one
multiprocessor holds at once (tests/gpu/occupancy.py). Loads and bytes are what one thread has
under way of global memory before it uses any (tests/gpu/sass.py); they need cuobjdump and
nvdisasm, which come with a toolkit or from the packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm.

tests/gpu/kernels.json has what was recorded. A kernel that has fewer warps or fewer bytes under
way than recorded, or spills, is named and makes the exit status 1. ``--record`` writes the table
anew, after a change that was meant. Another nvcc makes other code, and is not compared.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu import occupancy, sass

BUILD = Path(__file__).resolve().parents[2] / "build" / "core" / "cuda"
RECORDED = Path(__file__).resolve().parent / "kernels.json"
ARCHITECTURES = ("sm_80", "sm_90")  # of the table; ptxas's words are shown for all
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True)
class Kernel:
    """One kernel on one architecture; None is what no tool was there to ask."""

    registers: int
    shared: int
    spilled: int
    threads: int | None = None
    warps: int | None = None
    loads: int | None = None
    bytes: int | None = None


Kernels = dict[str, dict[str, Kernel]]  # by architecture, then by readable name


def readable(names: list[str]) -> dict[str, str]:
    """Mangled names -> ``attend_tensor<BFloat16, 2>``, as far as c++filt is there."""
    try:
        done = subprocess.run(["c++filt", *names], text=True, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}
    lines = done.stdout.splitlines()
    short = [re.sub(r"kvswap::cuda::|\(anonymous namespace\)::|^void ", "", x) for x in lines]
    short = [re.sub(r"\([\w:]+\)(?=\d)", "", x) for x in short]  # the type of an integer argument
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


def seen(path: Path, tools: Path | None) -> list[tuple[str, str, Kernel]]:
    """(mangled name, architecture, what it takes) of each kernel of one ``.ptxas`` file."""
    rows = read(path)
    threads: dict[str, int] = {}
    loads: dict[str, dict[str, sass.InFlight]] = {}
    if tools is not None and (compiled := path.with_suffix("")).is_file():
        threads = sass.threads_of(sass.listing(tools, compiled, "-ptx"))
        for architecture in ARCHITECTURES:
            told = sass.listing(tools, compiled, "-sass", "-arch", architecture)
            loads[architecture] = sass.loads_of(told)
    kernels = []
    for name, architecture, registers, shared, spilled in rows:
        block = threads.get(name)
        warps = block and occupancy.warps_at_once(architecture, block, registers, shared)
        found = loads.get(architecture, {}).get(name)
        way = asdict(found) if found else {}
        kernels.append(
            (name, architecture, Kernel(registers, shared, spilled, block, warps, **way))
        )
    return kernels


def collect(build: Path, tools: Path | None) -> Kernels:
    rows = [row for path in sorted(build.glob("*.ptxas")) for row in seen(path, tools)]
    names = readable(sorted({name for name, _, _ in rows}))
    kernels: Kernels = {}
    for name, architecture, kernel in rows:
        kernels.setdefault(architecture, {})[names[name]] = kernel
    return kernels


def worse(now: Kernel, before: dict[str, int]) -> list[str]:
    """What a kernel has less of than was recorded."""
    told = []
    for field, words in (("warps", "warps at once"), ("bytes", "bytes under way")):
        value = getattr(now, field)
        if value is not None and value < before[field]:
            told.append(f"{value} {words}, and had {before[field]}")
    return told


def complaints(kernels: Kernels, recorded: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """A line for each kernel that spills, grew worse, or is in one of the two only."""
    lines = [
        f"{name} on {architecture} spills {kernel.spilled} bytes"
        for architecture, found in kernels.items()
        for name, kernel in found.items()
        if kernel.spilled
    ]
    for architecture, before in recorded.items():
        found = kernels.get(architecture, {})
        for name in sorted(found.keys() | before.keys()):
            if name not in before:
                lines.append(f"{name} on {architecture} is not recorded: --record")
            elif name not in found:
                lines.append(f"{name} on {architecture} is recorded and not there: --record")
            else:
                for each in worse(found[name], before[name]):
                    lines.append(f"{name} on {architecture} has {each}")
    return lines


def show(kernels: Kernels) -> None:
    names = sorted({name for found in kernels.values() for name in found})
    width = max(map(len, names))
    fields = ("regs", "smem", "spill", "warps", "loads", "bytes")
    head = "".join(f"{field:>6}" for field in fields)  # fmt: skip
    print(" " * width + "".join(f"  {architecture:>36}" for architecture in sorted(kernels)))
    print(f"{'kernel':{width}}" + f"  {head}" * len(kernels))
    for name in names:
        line = f"{name:{width}}"
        for architecture in sorted(kernels):
            kernel = kernels[architecture].get(name)
            values = ("-",) * 6 if kernel is None else (
                kernel.registers, kernel.shared, kernel.spilled,
                kernel.warps, kernel.loads, kernel.bytes)  # fmt: skip
            line += "  " + "".join(f"{'-' if x is None else x:>6}" for x in values)
        print(line)


def compiler() -> str:
    """nvcc's release, as ``13.0.88``; empty where there is none."""
    try:
        done = subprocess.run(["nvcc", "--version"], text=True, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    return found[1] if found else ""


def table_of(kernels: Kernels, nvcc: str) -> str:
    """kernels.json: a line a kernel, so that a change shows as one."""
    lines = []
    for architecture in ARCHITECTURES:
        rows = []
        for name, kernel in sorted(kernels[architecture].items()):
            rows.append(f"    {json.dumps(name)}: {json.dumps(asdict(kernel))}")
        lines.append(f'  "{architecture}": {{\n' + ",\n".join(rows) + "\n  }")
    return f'{{\n  "nvcc": "{nvcc}",\n' + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of .ptxas and .o files")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.name} anew")
    args = parser.parse_args(arguments)
    tools = sass.tool_folder()
    kernels = collect(args.build, tools)
    if not kernels:
        print(f"cuda-report: nothing in {args.build}; make cuda-compile needs nvcc")
        return 0
    show(kernels)
    nvcc = compiler()
    if tools is None:
        print("cuda-report: warps, loads and bytes need cuobjdump and nvdisasm, which are not "
              "found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")  # fmt: skip
    if args.record:
        if any(kernel.loads is None for name in ARCHITECTURES for kernel in kernels[name].values()):
            print("cuda-report: --record needs all that a row has: the tools and the .o files")
            return 1
        RECORDED.write_text(table_of(kernels, nvcc), encoding="utf-8")
        print(f"cuda-report: wrote {RECORDED.name}")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    if (made_by := recorded.pop("nvcc")) != nvcc:
        print(f"cuda-report: recorded with nvcc {made_by}, this is {nvcc or 'unknown'}: "
              "spills alone are compared")  # fmt: skip
        recorded = {}
    lines = complaints(kernels, recorded)
    print(*lines, sep="\n", end="\n" if lines else "")
    count = sum(map(len, kernels.values()))
    print(f"{count} kernels, {len(lines)} of them spill, grew worse or are not recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
