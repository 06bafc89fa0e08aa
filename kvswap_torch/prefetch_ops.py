"""Records of a file read beside computation, for a program of one's own, without a `KVSwapCache`.

The readers are the cache's: io_uring, threads or plain calls, with O_DIRECT if the file system
takes it. Conventions are those of `kvswap_torch.ops`, which has these ops too. ::

    handle = ops.prefetch_open("layer0.kv", record_bytes)
    ticket = ops.prefetch_submit(handle, chosen)  # returns at once
    ...  # compute
    records = ops.prefetch_wait(handle, ticket, [len(chosen), 8, 2, 4, 128], torch.bfloat16)
    ops.prefetch_close(handle)

All tensors of these ops are on the CPU. Open and close a file outside of what `torch.compile`
compiles; submit and wait may be inside, in graphs that are run again and again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

import kvswap_torch._C  # noqa: F401  turns errors of the library into those of kvswap_torch.errors
from kvswap_torch.op_library import compiled as _ops


def prefetch_open(
    path: str | os.PathLike[str],
    record_bytes: int,
    first_byte: int = 0,
    reader: str = "auto",
    io: str = "auto",
    depth: int = 64,
) -> Tensor:
    """Opens a file of records of one size: KVSwap section 3.4.

    Parameters
    ----------
    path
        A plain file; it must not shrink while it is open.
    record_bytes
        Of each record, padding included: record ``i`` begins at ``first_byte + i * record_bytes``.
    first_byte
        Where record 0 begins.
    reader
        ``uring``, ``threads`` or ``sync``; ``auto``: the best of these that works here.
    io
        ``direct`` (past the page cache) or ``buffered``; ``auto``: direct if the file system takes
        it and `record_bytes` and `first_byte` are multiples of its blocks, which 4,096 always is.
    depth
        Reads in flight at most, 1..1024.

    Returns
    -------
    Tensor
        The handle, ``[4]`` int64: its number, `record_bytes`, how many records the file has, and 1
        if it is read past the page cache. Its storage and memory are held until `prefetch_close`.

    Raises
    ------
    OSError
        If the file cannot be opened (`kvswap_torch.StorageError`).
    """
    return _ops.prefetch_open(os.fspath(path), record_bytes, first_byte, reader, io, depth)


def prefetch_submit(handle: Tensor, records: Tensor) -> Tensor:
    """Begins to read records, and returns without waiting for them.

    Neighbours in the file that stand side by side in `records` are read together.

    Parameters
    ----------
    handle
        Of `prefetch_open`.
    records
        ``[count]`` int64, in any order, repeats allowed. At most 64 batches may be in flight.

    Returns
    -------
    Tensor
        The ticket, an int64 scalar. Tickets may be waited for in any order.
    """
    return _ops.prefetch_submit(handle, records)


def prefetch_wait(
    handle: Tensor, ticket: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The records of a ticket, once all have arrived. The bytes are not copied.

    Waiting for a ticket again reads again. A file remembers its newest 1,024 tickets.

    Parameters
    ----------
    handle
        Of `prefetch_open`.
    ticket
        Of `prefetch_submit`.
    shape
        ``[count, ...]`` of as many bytes as the records have.
    dtype
        What the bytes are.

    Returns
    -------
    Tensor
        Of that shape and dtype; its memory begins at a multiple of 4,096 bytes.

    Raises
    ------
    OSError
        If a read fails (`kvswap_torch.StorageError`), with the offset and the reason.
    """
    return _ops.prefetch_wait(handle, ticket, shape, dtype)


def prefetch_close(handle: Tensor) -> None:
    """Closes the file and frees what was not waited for; the handle's number becomes 0.

    Closing twice does nothing.
    """
    _ops.prefetch_close(handle)
