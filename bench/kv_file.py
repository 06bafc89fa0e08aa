"""K and V of every layer in a file, as a full cache holds them in memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from transformers.cache_utils import CacheLayerMixin

ALIGNMENT_BYTES = 4096  # of a layer: what mappings and O_DIRECT may need
ROOM_TOKENS = 128  # behind each head's tokens, so that decoded ones need no copy of the rest


class KvFile:
    """A file of layers: K, ``[batch, kv_heads, context + ROOM_TOKENS, width]``, then V, padded.

    Written through the page cache and then dropped from it by `flush`, so that whoever reads it
    begins at the disk. Not thread-safe.

    Parameters
    ----------
    path
        A folder, for a file without a name that is gone with the process; or a file, which is made
        when there is none and stays.
    size
        ``(batch, kv_heads, context, width of K, width of V)``.
    """

    def __init__(self, path: Path, layers: int, size: tuple[int, ...], dtype: torch.dtype):
        batch, kv_heads, self.context, *widths = size
        self.layers, self.dtype = layers, dtype
        positions = self.context + ROOM_TOKENS
        self.shapes = [torch.Size((batch, kv_heads, positions, width)) for width in widths]
        self.payload_bytes = sum(shape.numel() for shape in self.shapes) * dtype.itemsize
        self.layer_bytes = -(-self.payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if path.is_dir():
            with tempfile.TemporaryFile(dir=path) as file:
                self.fd = os.dup(file.fileno())
        else:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self.fd).st_size < self.nbytes:
            os.truncate(self.fd, self.nbytes)

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes

    def open_direct(self) -> int:
        """Another descriptor, which goes past the page cache."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT)

    def write(self, layer: int, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: ``[batch, kv_heads, tokens, width]``, of positions `begin` and on."""
        part = layer * self.layer_bytes
        for shape, data in zip(self.shapes, (keys, values), strict=True):
            batch, kv_heads, positions, width = shape
            row_bytes = width * self.dtype.itemsize
            rows = data.contiguous().view(torch.uint8).numpy()
            for sequence in range(batch):
                for head in range(kv_heads):
                    before = sequence * kv_heads + head
                    at = part + (before * positions + begin) * row_bytes
                    _write_all(self.fd, memoryview(rows[sequence, head]).cast("B"), at)
            part += shape.numel() * self.dtype.itemsize

    def views(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer's bytes."""
        data = layer[: self.payload_bytes].view(self.dtype)
        keys, values = self.shapes
        first, second = data.split((keys.numel(), values.numel()))
        return first.view(keys), second.view(values)

    def flush(self) -> None:
        """To the disk, and out of the page cache."""
        os.fsync(self.fd)
        self.drop_pages()

    def drop_pages(self) -> None:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


class FileLayer(CacheLayerMixin):
    """What transformers asks of a layer whose tensors are in a `KvFile`, filled from the start.

    A subclass's `update` takes the new tokens and gives views of all positions.
    """

    is_sliding = False
    # Makes transformers build a mask for one query, too. With a mask it packs the queries of a KV
    # head, as over a StaticCache; without, it takes a path of torch's that is several times slower
    # on CPUs, and no peer should lose by that.
    is_compileable = True

    def __init__(self, context: int):
        self.filled = context
        self.decoded = 0
        self.keys = self.values = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the file is there."""

    def get_seq_length(self) -> int:
        return self.filled + self.decoded

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
