"""The peer that a reviewer asks for first: K and V in a mapped file, and the kernel pages.

Stock full attention reads views of the mapping, and decoded tokens are written into it. The kernel
reads ahead as it does by itself, or not at all: where a disk's setting for it is large and memory
is little, pages are dropped before they are used, so the faster of the two is kept. It is only a
peer when the memory for its pages is limited (memory_cap.py); else it is a cache in memory.
"""

from __future__ import annotations

import mmap

import torch
from transformers.cache_utils import Cache

from bench.kv_file import FileLayer, KvFile

ADVICE = {"normal": mmap.MADV_NORMAL, "random": mmap.MADV_RANDOM}


class MappedLayer(FileLayer):
    """One layer: views ``[batch, kv_heads, positions, width]`` of its part of the file."""

    def __init__(self, file: KvFile, index: int):
        super().__init__(file.context)
        self.memory = mmap.mmap(file.fd, file.layer_bytes, offset=index * file.layer_bytes)
        self.keys, self.values = file.views(torch.frombuffer(self.memory, dtype=torch.uint8))

    def update(self, key_states, value_states, *args, **kwargs):
        begin = self.get_seq_length()
        self.decoded += key_states.shape[2]
        end = self.get_seq_length()
        if end > self.keys.shape[2]:
            raise ValueError(
                f"mmap: the file has room for {self.keys.shape[2]} positions, got {end}; decode "
                "fewer"
            )
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]


class MappedCache(Cache):
    """A transformers cache over a filled `KvFile`, which it closes."""

    def __init__(self, file: KvFile):
        self.file = file
        super().__init__(layers=[MappedLayer(file, index) for index in range(file.layers)])

    def advise(self, advice: str) -> None:
        """Tells the kernel how the mappings are read: "normal", or "random": nothing ahead."""
        for layer in self.layers:
            layer.memory.madvise(ADVICE[advice])

    def close(self) -> None:
        """The mappings go with the last view of them."""
        for layer in self.layers:
            layer.keys = layer.values = layer.memory = None
        self.file.close()
