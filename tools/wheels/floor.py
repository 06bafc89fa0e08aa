"""Stand-ins for libc, libm and libstdc++ that have no newer symbol than manylinux_2_28 allows.

A library linked on Debian 12 would ask for glibc 2.36 and libstdc++ 12. Linked against these it
asks for what a machine with glibc 2.28 has: for each symbol its newest version that is old enough.
What came later is linked in: of libstdc++ from its static archive, hidden, and of glibc from
``old_glibc.c`` beside this file. A symbol that is in neither is an undefined reference, so that
nothing newer gets into a wheel unseen.

The stand-ins are made from the compiler's own libraries, hold names alone, and are linked against,
never loaded or shipped.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# manylinux_2_28: what AlmaLinux 8 has, with gcc 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# The name to link by, and the file that has the symbols.
LIBRARIES = {"c": "libc.so.6", "m": "libm.so.6", "stdc++": "libstdc++.so.6"}
HIDDEN = ("libstdc++.a", "libkvswap_old_glibc.a")
_VERSION = re.compile(r"([A-Z]+)_([\d.]+)")
_SYMBOL = re.compile(
    r"\s*\d+:\s+[0-9a-f]+\s+(?P<size>\d+|0x[0-9a-f]+)\s+(?P<type>\w+)\s+(?P<bind>\w+)\s+\w+\s+"
    r"(?P<section>\w+)\s+(?P<name>[^@\s]+)@@?(?P<version>\S+)"
)


@dataclass(frozen=True)
class Symbol:
    """One that a library has, in one of its versions."""

    name: str
    version: str
    kind: str  # as readelf says: FUNC, IFUNC, OBJECT, TLS
    size: int = 0


def numbers(version: str) -> tuple[str, tuple[int, ...]] | None:
    """``GLIBC_2.28`` as a family and numbers; None for what is of no release, as GLIBC_PRIVATE."""
    found = _VERSION.fullmatch(version)
    return None if found is None else (found[1], tuple(map(int, found[2].split("."))))


def read_symbols(told: str) -> Iterator[Symbol]:
    """Those defined, from what ``readelf --dyn-syms`` says."""
    for line in told.splitlines():
        found = _SYMBOL.match(line)
        if found and found["section"] not in ("UND", "ABS"):
            yield Symbol(found["name"], found["version"], found["type"], int(found["size"], 0))


def old_enough(symbols: Iterable[Symbol]) -> list[Symbol]:
    """Of each name the newest version that every machine has which a wheel promises."""
    chosen: dict[str, tuple[tuple[int, ...], Symbol]] = {}
    for symbol in symbols:
        parsed = numbers(symbol.version)
        if parsed is None or parsed[1] > NEWEST.get(parsed[0], ()):
            continue
        if symbol.name not in chosen or parsed[1] > chosen[symbol.name][0]:
            chosen[symbol.name] = (parsed[1], symbol)
    return [symbol for _, symbol in chosen.values()]


def assembly(symbols: Iterable[Symbol]) -> str:
    """A source in which each is a label of its kind."""
    sections = {
        "OBJECT": (".data", "@object"),
        "TLS": ('.section .tbss,"awT",@nobits', "@tls_object"),
    }
    lines = []
    for i, symbol in enumerate(symbols):
        section, kind = sections.get(symbol.kind, (".text", "@function"))
        lines += [section, f".globl s{i}", f".type s{i},{kind}", f".size s{i},{symbol.size or 8}"]
        lines += [f"s{i}: .skip {symbol.size if symbol.kind in sections else 8}"]
        lines += [f".symver s{i},{symbol.name}@@{symbol.version}"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",%progbits', ""])


def version_script(symbols: Iterable[Symbol]) -> str:
    """The versions that a library names, for its linker."""
    versions = sorted({symbol.version for symbol in symbols})
    # The labels are hidden by a version of their own: in another's, its symbols would be too.
    return "\n".join(["LABELS { local: *; };", *(f"{name} {{ }};" for name in versions), ""])


def make(folder: Path, compiler: str) -> None:
    """Writes all stand-ins into `folder`, which ``linker_flags()`` then names.

    Raises
    ------
    subprocess.CalledProcessError
        A tool of the compiler's failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tools = compiler.removesuffix("g++")
    script = Path(_run(compiler, "-print-file-name=libc.so").strip()).read_text()
    loader = Path(re.findall(r"\S+/ld-linux\S+", script)[0]).name
    for name, file in (LIBRARIES | {"loader": loader}).items():
        real = _run(compiler, f"-print-file-name={file}").strip()
        told = _run(f"{tools}readelf", "--dyn-syms", "--wide", real)
        _write(folder, name, file, old_enough(read_symbols(told)), compiler)
    source = Path(__file__).with_name("old_glibc.c")
    done = folder / "old_glibc.o"
    _run(f"{tools}gcc", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
         "-c", source, "-o", done)  # fmt: skip
    archive = folder / HIDDEN[1]
    archive.unlink(missing_ok=True)
    _run(f"{tools}ar", "rcs", archive, done)
    # The archive last: only what the stand-ins lack is taken from it.
    static = _run(compiler, "-print-file-name=libstdc++.a").strip()
    always_static = _run(compiler, "-print-file-name=libc_nonshared.a").strip()
    scripts: Mapping[str, tuple[str, ...]] = {
        "c": ("libc.so.6", archive.name, always_static, loader),
        "m": ("libm.so.6",),
        "stdc++": ("libstdc++.so.6", static),
    }
    for name, parts in scripts.items():
        found = [part if part.startswith("/") else str(folder / part) for part in parts]
        (folder / f"lib{name}.so").write_text(f"GROUP ( {' '.join(found)} )\n")


def linker_flags(folder: Path) -> str:
    """What a shared library is linked with, for CMake."""
    hidden = " ".join(f"-Wl,--exclude-libs,{name}" for name in HIDDEN)
    return f"-L{folder} {hidden}"


def too_new(library: Path, readelf: str = "readelf") -> list[str]:
    """Versions that a library asks for and that a promised machine may lack."""
    asked = set(re.findall(r"Name: (\S+)", _run(readelf, "--version-info", "--wide", library)))
    parsed = {version: numbers(version) for version in sorted(asked)}
    return [
        version
        for version, number in parsed.items()
        if number and number[0] in NEWEST and number[1] > NEWEST[number[0]]
    ]


def _write(folder: Path, name: str, file: str, symbols: list[Symbol], compiler: str) -> None:
    source, script = folder / f"{name}.s", folder / f"{name}.map"
    source.write_text(assembly(symbols))
    script.write_text(version_script(symbols))
    _run(compiler, "-shared", "-nostdlib", f"-Wl,-soname,{file}",
         f"-Wl,--version-script,{script}", source, "-o", folder / file)  # fmt: skip


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return done.stdout
