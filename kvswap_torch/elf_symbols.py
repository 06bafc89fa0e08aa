"""Names in a shared library: those that it leaves to others, and whether it has one.

Read from the file as the loader reads them, so that nothing is loaded: ELF of 64 bits, least byte
first, with a GNU hash table, which libraries for Linux on x86-64 and AArch64 have.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

PT_LOAD, PT_DYNAMIC = 1, 2
DT_STRTAB, DT_SYMTAB, DT_GNU_HASH, DT_VERSYM = 5, 6, 0x6FFFFEF5, 0x6FFFFFF0
STB_WEAK = 2
SYMBOL_BYTES = 24
UNVERSIONED = 1  # the highest number in DT_VERSYM that names no version


class SharedLibrary:
    """One library's dynamic symbols. A context manager: the file is mapped until its end.

    Raises
    ------
    ValueError
        The file is not such a library.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._read()
            except (struct.error, KeyError, StopIteration, ValueError) as error:
                raise ValueError(
                    f"{path}: must be a shared library of 64 bits with a GNU hash table, and is not"
                ) from error

    def __enter__(self) -> SharedLibrary:
        return self

    def __exit__(self, *error: object) -> None:
        self._bytes.close()

    def _read(self) -> None:
        if self._bytes[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no ELF of 64 bits")
        (first,) = self._unpack("<Q", 32)
        size, count = self._unpack("<HH", 54)
        headers = [self._unpack("<IIQQQQQ", first + i * size) for i in range(count)]
        self._loads = [(h[3], h[3] + h[5], h[2]) for h in headers if h[0] == PT_LOAD]
        at = next(h[2] for h in headers if h[0] == PT_DYNAMIC)
        tags: dict[int, int] = {}
        while (entry := self._unpack("<QQ", at))[0] != 0:
            tags[entry[0]] = entry[1]
            at += 16
        self._strings, self._symbols = self._at(tags[DT_STRTAB]), self._at(tags[DT_SYMTAB])
        self._versions = self._at(tags[DT_VERSYM]) if DT_VERSYM in tags else None
        table = self._at(tags[DT_GNU_HASH])
        self._buckets, self._hashed_from, words, self._shift = self._unpack("<IIII", table)
        self._bloom, self._bloom_words = table + 16, words
        self._bucket_at = table + 16 + 8 * words
        self._chain_at = self._bucket_at + 4 * self._buckets

    def needed(self) -> list[str]:
        """Names that must come from another library, but for those of a named version.

        glibc's, libstdc++'s and CUDA's have one, torch's and Python's have none. What is weak may
        be missing.
        """
        found = []
        for i in range(1, self._hashed_from):
            name, info, _, section = self._unpack("<IBBH", self._symbols + SYMBOL_BYTES * i)
            if section == 0 and info >> 4 != STB_WEAK and self._version(i) <= UNVERSIONED:
                found.append(self._name(name))
        return found

    def has(self, name: str) -> bool:
        """Whether the library defines a symbol of that name."""
        hashed = 5381
        for byte in name.encode():
            hashed = (hashed * 33 + byte) & 0xFFFFFFFF
        (filtered,) = self._unpack("<Q", self._bloom + 8 * (hashed // 64 % self._bloom_words))
        if not filtered >> hashed % 64 & filtered >> (hashed >> self._shift) % 64 & 1:
            return False
        (i,) = self._unpack("<I", self._bucket_at + 4 * (hashed % self._buckets))
        while i:
            (chained,) = self._unpack("<I", self._chain_at + 4 * (i - self._hashed_from))
            if chained | 1 == hashed | 1:
                found, _, _, section = self._unpack("<IBBH", self._symbols + SYMBOL_BYTES * i)
                if section != 0 and self._name(found) == name:
                    return True
            if chained & 1:
                break
            i += 1
        return False

    def _version(self, i: int) -> int:
        if self._versions is None:
            return UNVERSIONED
        return self._unpack("<H", self._versions + 2 * i)[0] & 0x7FFF

    def _name(self, at: int) -> str:
        begin = self._strings + at
        return self._bytes[begin : self._bytes.find(b"\0", begin)].decode()

    def _at(self, address: int) -> int:
        """Where in the file an address in memory is."""
        return next(
            at + address - begin for begin, end, at in self._loads if begin <= address < end
        )

    def _unpack(self, form: str, at: int) -> tuple[int, ...]:
        return struct.unpack_from(form, self._bytes, at)
