"""The peer that a reviewer asks for first: K and V in a mapped file, and the kernel pages.

Stock full attention reads views of the mapping, and decoded tokens are written into it. Nothing
is advised and nothing is read ahead but what the kernel reads by itself. It is only a peer when
the memory for its pages is limited (memory_cap.py); otherwise it is a full cache in memory.
"""

from __future__ import annotations

import mmap

import torch
from transformers.cache_utils import Cache

from tests.bench.kv_file import FileLayer, KvFile


class MappedLayer(FileLayer):
    """One layer: views ``[batch, kv_heads, columns, head_dim]`` of its part of the file."""

    def __init__(self, file: KvFile, index: int):
        super().__init__(file.context)
        memory = mmap.mmap(file.fd, file.layer_bytes, offset=index * file.layer_bytes)
        data = torch.frombuffer(memory, dtype=torch.uint8)[: file.payload_bytes]
        self.keys, self.values = data.view(file.dtype).view(file.shape)

    def update(self, key_states, value_states, *args, **kwargs):
        begin = self.get_seq_length()
        self.decoded += key_states.shape[2]
        end = self.get_seq_length()
        if end > self.keys.shape[2]:
            raise ValueError(
                f"mmap: the file has room for {self.keys.shape[2]} columns, got {end}; decode fewer"
            )
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]


class MappedCache(Cache):
    """A transformers cache over a filled `KvFile`, which it closes."""

    def __init__(self, file: KvFile):
        self.file = file
        super().__init__(layers=[MappedLayer(file, index) for index in range(file.layers)])

    def close(self) -> None:
        """The mappings go with the last view of them."""
        for layer in self.layers:
            layer.keys = layer.values = None
        self.file.close()
