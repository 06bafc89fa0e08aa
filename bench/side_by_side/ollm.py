"""oLLM as a contender: its `KVCache` over our K and V, a file for each layer.

An optional peer: `make peers` installs it. Each step reads every layer's file whole, through the
kernel's page cache; what was decoded stays in memory beside. Where memory is plenty, the page cache
is a full cache in memory by another name, so its pages are dropped before each step: what is kept
on the disk then comes from the disk, as it does for all others that are measured.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.contenders import Contender, whole_layer
from bench.side_by_side.plan import NO_OLLM, Cell


class OllmContender(Contender):
    """Filled by its own first update of each layer, which writes that layer's file.

    Raises
    ------
    ImportError
        oLLM is not installed.
    """

    def __init__(self, model: Any, cell: Cell, folder: Path):
        kind = load_cache()
        self.folder = tempfile.TemporaryDirectory(dir=folder)
        cache = kind(cache_dir=self.folder.name, device="cpu")
        super().__init__(model, cache, cell.batch, cell.context)
        for layer in range(cell.shape.layers):
            cache.update(*whole_layer(cell.shape, cell.batch, cell.context, layer), layer)
        self.files = sorted(Path(cache.cache_folder).iterdir())
        self._each_file(os.fsync)  # only clean pages can be dropped
        self.before_step = lambda step: self._each_file(_drop_pages)

    @property
    def nbytes(self) -> int:
        """Of a step: one layer as it was read, and what was decoded of all."""
        decoded = [*self.cache.key_cache2, *self.cache.value_cache2]
        largest = max(file.stat().st_size for file in self.files)
        return largest + sum(tensor.nbytes for tensor in decoded)

    def about(self) -> dict[str, Any]:
        """What the numbers are of."""
        from importlib.metadata import version

        return {"ollm": version("ollm"), "page_cache": "dropped before each step"}

    def close(self) -> None:
        super().close()
        self.folder.cleanup()

    def _each_file(self, act: Callable[[int], None]) -> None:
        for file in self.files:
            with file.open("rb") as opened:
                act(opened.fileno())


def load_cache() -> type:
    try:
        from ollm.kvcache import KVCache
    except ImportError as error:
        raise ImportError(f"{NO_OLLM} ({error})") from error
    return KVCache


def _drop_pages(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
