"""`layer.keys` and `layer.values` of a layer on disk: what can be asked of them without reading.

Other code looks at a cache's tensors to learn their length, and cuts them to take back an answer:
``layer.keys = layer.keys[:, :, :n]`` on every layer, as kvpress' pipeline does between two
questions. That much is possible here; anything that needs numbers says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch


@dataclass(frozen=True)
class LayerView:
    """The keys or values of one layer, of which `positions` are meant.

    Parameters
    ----------
    layer
        Its number among those on disk.
    side
        "keys" or "values".
    shape, dtype, device
        As the tensor's would be: ``[batch, kv_heads, positions, head_dim]``.
    """

    layer: int
    side: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def positions(self) -> int:
        return self.shape[2]

    def __getitem__(self, index: Any) -> LayerView:
        """``[:, :, :n]`` alone: the first n positions."""
        everything = slice(None)
        if not (isinstance(index, tuple) and len(index) in (3, 4)):
            self._refuse(f"[{index!r}]")
        *whole, positions = index[:3]
        plain = all(part == everything for part in (*whole, *index[3:]))
        if not (plain and isinstance(positions, slice) and positions.start in (None, 0)):
            self._refuse("this index")
        if positions.step not in (None, 1):
            self._refuse("a step")
        kept = len(range(*positions.indices(self.positions)))
        shape = torch.Size((*self.shape[:2], kept, self.shape[3]))
        return LayerView(self.layer, self.side, shape, self.dtype, self.device)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> NoReturn:
        raise TypeError(_sentence("keys and values", getattr(function, "__name__", "torch")))

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(_sentence(self.side, what))


def _sentence(side: str, what: str) -> str:
    return (
        f"KVSwapCache: {side} of a layer on disk are no tensor, and have no {what}; they can be "
        "cut as [:, :, :n] on all layers, which cache.crop() does at once, and cache.to_dynamic() "
        "reads them into memory"
    )
