"""The peer that reads everything back: FlexGen's and oLLM's way, in its strongest form.

K and V of each layer stand in one file, each sequence's heads one after the other; at each step
every layer is read whole with O_DIRECT in large blocks by several threads, the next layer while
this one computes, and attended by torch's own kernel. Two layers are in memory at a time.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from transformers.cache_utils import Cache

from bench.kv_file import FileLayer, KvFile

THREADS = 4
BLOCK_BYTES = 4 << 20


class LayerReader:
    """Reads a `KvFile`'s layers whole, into one of two buffers by turns.

    Parameters
    ----------
    bytes_per_second
        A modelled device's bandwidth: a read takes at least its time. None: the disk as it is.
    """

    def __init__(self, file: KvFile, bytes_per_second: float | None = None):
        self.file = file
        self._direct = file.open_direct()
        self._pool = ThreadPoolExecutor(THREADS)
        self.buffers = [mmap.mmap(-1, file.layer_bytes) for _ in range(2)]
        self._bytes_per_second = bytes_per_second

    def start(self, layer: int) -> list[Future]:
        """Begins to read a layer into the buffer of its parity."""
        view = memoryview(self.buffers[layer % 2])
        began = time.perf_counter()
        layer_bytes = self.file.layer_bytes

        def read(at: int) -> None:
            block = view[at : at + BLOCK_BYTES]
            got = os.preadv(self._direct, [block], layer * layer_bytes + at)
            if got != len(block):
                raise OSError(f"full restore: a read of {len(block)} bytes gave {got}")
            if self._bytes_per_second is not None:
                due = began + (at + got) / self._bytes_per_second
                time.sleep(max(0.0, due - time.perf_counter()))

        return [self._pool.submit(read, at) for at in range(0, layer_bytes, BLOCK_BYTES)]

    def finish(self, layer: int, reads: list[Future]) -> torch.Tensor:
        """The layer's bytes, valid until the layer after next is started."""
        for read in reads:
            read.result()
        return torch.frombuffer(self.buffers[layer % 2], dtype=torch.uint8)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._direct)


class RestoreLayer(FileLayer):
    """One layer: what was filled is on disk, what is decoded stays in memory."""

    def __init__(self, cache: FullRestoreCache, index: int):
        super().__init__(cache.file.context)
        self.cache, self.index = cache, index

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys = key_states if self.keys is None else torch.cat([self.keys, key_states], 2)
        self.values = (
            value_states if self.values is None else torch.cat([self.values, value_states], 2)
        )
        self.decoded = self.keys.shape[2]
        keys, values = self.cache.restore(self.index)
        begin, end = self.filled, self.get_seq_length()
        keys[:, :, begin:end] = self.keys
        values[:, :, begin:end] = self.values
        return keys[:, :, :end], values[:, :, :end]


class FullRestoreCache(Cache):
    """A transformers cache that reads each layer whole at each step.

    It closes its file. `bytes_per_second` is `LayerReader`'s.
    """

    def __init__(self, file: KvFile, bytes_per_second: float | None = None):
        self.file = file
        self.reader = LayerReader(file, bytes_per_second)
        self._reads: dict[int, list[Future]] = {}
        super().__init__(layers=[RestoreLayer(self, index) for index in range(file.layers)])

    def restore(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        reads = self._reads.pop(layer, None) or self.reader.start(layer)
        data = self.reader.finish(layer, reads)
        following = (layer + 1) % self.file.layers
        self._reads[following] = self.reader.start(following)
        return self.file.views(data)

    def close(self) -> None:
        for layer, reads in self._reads.items():
            self.reader.finish(layer, reads)
        self.reader.close()
        self.file.close()
