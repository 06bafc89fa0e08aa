"""What machine code says of a kernel: loads of global memory that are under way at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FUNCTION = re.compile(r"^\s*Function : (\w+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LOAD = re.compile(r"^(LDG|LD)\.E\b")  # LD is of a generic address: memory that may be shared
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
ENTRY = re.compile(r"^(?:\.visible |\.weak )?\.entry (\w+)\(|^\.maxntid (\d+), (\d+), (\d+)")
LEAVES = re.compile(r"^(EXIT|BRX|RET|JMP)\b")


@dataclass(frozen=True)
class InFlight:
    """The most that one thread has under way at one place of a kernel."""

    loads: int = 0
    bytes: int = 0


def width_of(mnemonic: str) -> int:
    """Bytes that a load brings to one thread."""
    return next((WIDTHS[part] for part in mnemonic.split(".") if part in WIDTHS), 4)


def registers_of(operands: str) -> set[int]:
    """Registers that the operands name; an address of 64 bits is two."""
    named = set()
    for found in REGISTER.finditer(operands):
        named |= {int(found[1]), int(found[1]) + bool(found[2])}
    return named


def in_flight(lines: list[str]) -> InFlight:
    """The most loads issued before the first use of any of them, in the order of the listing.

    A path that jumps is followed where it falls through. An instruction that names a load's
    register ends that load and all issued before it, as memory answers in order. Loads
    to the same register count as the last of them: each is under a predicate of its own. What an
    unconditional jump leaves has nothing under way.
    """
    pending: list[tuple[set[int], int]] = []  # registers and bytes
    most = InFlight()
    for line in lines:
        found = INSTRUCTION.match(line)
        if found is None:
            continue
        predicate, mnemonic, operands = found.groups()
        is_load = LOAD.match(mnemonic) is not None
        named = registers_of(operands.split(",", 1)[-1] if is_load else operands) if pending else ()
        used = [at for at, (registers, _) in enumerate(pending) if not registers.isdisjoint(named)]
        if used:
            del pending[: used[-1] + 1]
        if is_load and (target := re.match(r"R(\d+)", operands)):
            size = width_of(mnemonic)
            first = int(target[1])
            brought = set(range(first, first + max(1, size // 4)))
            pending = [each for each in pending if brought.isdisjoint(each[0])]
            pending.append((brought, size))
            total = sum(each for _, each in pending)
            most = InFlight(max(most.loads, len(pending)), max(most.bytes, total))
        is_jump = mnemonic == "BRA" and "P" not in operands
        if predicate is None and (is_jump or LEAVES.match(mnemonic)):
            pending.clear()
    return most


def loads_of(listing: str) -> dict[str, InFlight]:
    """Mangled name of each function of ``cuobjdump -sass`` -> what it has under way."""
    lines: dict[str, list[str]] = {}
    name = ""
    for line in listing.splitlines():
        if found := FUNCTION.match(line):
            name = found[1]
            lines[name] = []
        elif name:
            lines[name].append(line)
    return {name: in_flight(each) for name, each in lines.items()}


def threads_of(listing: str) -> dict[str, int]:
    """Mangled name of each kernel of ``cuobjdump -ptx`` -> threads of a block at most."""
    threads = {}
    name = ""
    for line in listing.splitlines():
        if found := ENTRY.match(line):
            if found[1]:
                name = found[1]
            else:
                threads[name] = int(found[2]) * int(found[3]) * int(found[4])
    return threads


def tool_folder() -> Path | None:
    """Where cuobjdump and nvdisasm are: nvcc's folder, PATH, or their packages of PyPI."""
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parent] if nvcc else []
    homes += [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    for place in filter(None, sys.path):
        homes += sorted(Path(place).glob("nvidia/cu*/bin"))
    for home in homes:
        if (home / "cuobjdump").is_file() and (home / "nvdisasm").is_file():
            return home
    return None


def listing(folder: Path, path: Path, *options: str) -> str:
    """What cuobjdump of that folder says of an object."""
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(folder / "cuobjdump"), *options, str(path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout
