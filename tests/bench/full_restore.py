"""The peer that reads everything back: FlexGen's and oLLM's way, in its strongest form.

K and V of each layer stand in one file, each sequence's heads one after the other; at each step
every layer is read whole with O_DIRECT in large blocks by several threads, the next layer while
this one computes, and attended by torch's own kernel. Two layers are in memory at a time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK_BYTES = 4 << 20
THREADS = 4
ROOM_TOKENS = 128


class RestoreFile:
    """Layers of fixed size in an unnamed file, read whole.

    Parameters
    ----------
    bytes_per_second
        A modelled device's bandwidth: a read takes at least its time. None: the disk as it is.
    """

    def __init__(self, path: Path, layer_bytes: int, bytes_per_second: float | None = None):
        self.layer_bytes = -(-layer_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._file = tempfile.TemporaryFile(dir=path, buffering=0)  # noqa: SIM115
        self._direct = os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDWR | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(THREADS)
        self._buffers = [mmap.mmap(-1, self.layer_bytes) for _ in range(2)]
        self._bytes_per_second = bytes_per_second
        self.bytes_read = 0
        self.wait_seconds = 0.0

    def write(self, layer: int, data: torch.Tensor) -> None:
        """data: a layer's bytes, contiguous."""
        source = memoryview(data.view(torch.uint8).flatten().numpy())
        buffer = self._buffers[0]
        buffer[: len(source)] = source
        view = memoryview(buffer)
        for at in range(0, self.layer_bytes, BLOCK_BYTES):
            os.pwritev(self._direct, [view[at : at + BLOCK_BYTES]], layer * self.layer_bytes + at)

    def start(self, layer: int) -> list[Future]:
        """Begins to read a layer into the buffer of its parity."""
        view = memoryview(self._buffers[layer % 2])
        began = time.perf_counter()

        def read(at: int) -> None:
            block = view[at : at + BLOCK_BYTES]
            got = os.preadv(self._direct, [block], layer * self.layer_bytes + at)
            if got != BLOCK_BYTES:
                raise OSError(f"full restore: a read of {BLOCK_BYTES} bytes gave {got}")
            if self._bytes_per_second is not None:
                due = began + (at + BLOCK_BYTES) / self._bytes_per_second
                time.sleep(max(0.0, due - time.perf_counter()))

        return [self._pool.submit(read, at) for at in range(0, self.layer_bytes, BLOCK_BYTES)]

    def finish(self, layer: int, reads: list[Future]) -> torch.Tensor:
        """The layer's bytes, valid until the layer after next is started."""
        began = time.perf_counter()
        for read in reads:
            read.result()
        self.wait_seconds += time.perf_counter() - began
        self.bytes_read += self.layer_bytes
        return torch.frombuffer(self._buffers[layer % 2], dtype=torch.uint8)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._direct)
        self._file.close()


class RestoreLayer(CacheLayerMixin):
    """One layer: what was filled is on disk, what is decoded stays in memory."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: FullRestoreCache, index: int):
        self.cache, self.index = cache, index
        self.keys = self.values = None
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states) -> None: ...

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys = key_states if self.keys is None else torch.cat([self.keys, key_states], 2)
        self.values = (
            value_states if self.values is None else torch.cat([self.values, value_states], 2)
        )
        keys, values = self.cache.restore(self.index)
        begin, end = self.cache.context, self.get_seq_length()
        keys[:, :, begin:end] = self.keys
        values[:, :, begin:end] = self.values
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.cache.context + (0 if self.keys is None else self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class FullRestoreCache(Cache):
    """A transformers cache that reads each layer whole at each step.

    Parameters
    ----------
    shape
        ``(batch, kv_heads, context, head_dim)`` of what `fill` is given.
    """

    def __init__(
        self,
        path: Path,
        layers: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        bytes_per_second: float | None = None,
    ):
        batch, kv_heads, self.context, head_dim = shape
        # With room behind each head's tokens, so that decoded ones need no copy of the rest.
        self.shape = (batch, kv_heads, self.context + ROOM_TOKENS, head_dim)
        self.dtype = dtype
        self.count = layers
        elements = 2 * torch.Size(self.shape).numel()
        self._bytes = elements * dtype.itemsize
        self.file = RestoreFile(path, self._bytes, bytes_per_second)
        self._reads: dict[int, list[Future]] = {}
        super().__init__(layers=[RestoreLayer(self, index) for index in range(layers)])

    def fill(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        data = torch.zeros((2, *self.shape), dtype=self.dtype)
        data[0, :, :, : self.context] = keys
        data[1, :, :, : self.context] = values
        self.file.write(layer, data)

    def restore(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        reads = self._reads.pop(layer, None) or self.file.start(layer)
        data = self.file.finish(layer, reads)[: self._bytes].view(self.dtype)
        following = (layer + 1) % self.count
        self._reads[following] = self.file.start(following)
        keys, values = data.view(2, *self.shape)
        return keys, values

    def close(self) -> None:
        for layer, reads in self._reads.items():
            self.file.finish(layer, reads)
        self.file.close()
