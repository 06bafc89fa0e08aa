"""A disk that fails below the C++ library, in this process: tests/cpp/io/faulty_kernel.h."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

CALLS = ("open", "allocate", "write", "read", "ring_setup", "ring_submit", "facts")
_LIBRARY = Path(__file__).parents[2] / "build/dev/tests/cpp/libfaulty_kernel.so"


def _library() -> ctypes.CDLL:
    import kvswap_torch._C  # noqa: F401  (the library that this one reaches into)

    return ctypes.CDLL(str(_LIBRARY))


def checksum_of(data: bytes) -> int:
    """What a saved cache's manifest is signed by."""
    library = _library()
    library.checksum_of_bytes.restype = ctypes.c_ulong
    return library.checksum_of_bytes(data, ctypes.c_ulong(len(data)))


@contextlib.contextmanager
def striking(nth: int, error: int = 0, log: int = -1) -> Iterator[Callable[[], bool]]:
    """The `nth` step of a save (0: the first) kills this process, or fails with that errno.

    Yields whether it came to that. What reaches the disk, as ``synced INODE``, and each ``renamed``
    are written to the descriptor `log`.
    """
    library = _library()
    library.faulty_step(ctypes.c_long(nth), error, log)
    try:
        yield lambda: bool(library.faulty_step_has_struck())
    finally:
        library.faulty_step_end()


class FaultyKernel:
    """Arms and heals; counts from the newest `arm`. One at a time."""

    def __init__(self) -> None:
        self._library = _library()
        self._library.faulty_injected.restype = ctypes.c_ulong
        self._library.faulty_seen.restype = ctypes.c_ulong

    def arm(
        self,
        call: str,
        nth: int = 1,
        lasts: bool = False,
        error: int = errno.EIO,
        is_short: bool = False,
        delay_us: int = 0,
        reorders: bool = False,
        name: str = "",
    ) -> None:
        """From the `nth` call of its kind on, once or for ever; see `KernelFault` in C++."""
        self._library.faulty_arm(
            CALLS.index(call),
            ctypes.c_ulong(nth),
            int(lasts),
            error,
            int(is_short),
            delay_us,
            int(reorders),
            name.encode(),
        )

    def heal(self) -> None:
        self._library.faulty_heal()

    @property
    def injected(self) -> int:
        return self._library.faulty_injected()

    def seen(self, call: str) -> int:
        return self._library.faulty_seen(CALLS.index(call))

    def disarm(self) -> None:
        self._library.faulty_disarm()


@contextlib.contextmanager
def faulty_kernel() -> Iterator[FaultyKernel]:
    """Linux itself again at the end. Caches are opened and closed within."""
    kernel = FaultyKernel()
    # In place from the start: a call is under either kernel as a whole.
    kernel.arm("read", nth=1 << 62)
    try:
        yield kernel
    finally:
        kernel.disarm()
