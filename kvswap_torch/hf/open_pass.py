"""A forward pass under way: where it began, and what is left of it when it ends in an exception."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from torch import nn
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvswap_torch.errors import KVSwapError
from kvswap_torch.hf.edits import forget


class OpenPass:
    """Of one cache: from the start of the module that was called with it until that returns.

    A Ctrl-C that ends a pass runs no hook, so the next use of the cache asks `is_running`, and
    takes the pass back when it is not.

    Parameters
    ----------
    module
        What was called, now about to run its forward.
    positions
        In the layers on disk, before it.
    others
        The layers that are not on disk.
    """

    def __init__(self, module: nn.Module, positions: int, others: Sequence[Any]):
        self.module = module
        self.positions = positions
        self.began = time.perf_counter()
        self.thread = threading.current_thread()
        self._others = others
        self._lengths = [_length(layer) for layer in others]
        self._fields = [_fields(layer) for layer in others]
        self._frame: FrameType | None = _call_of(module)

    def is_running(self) -> bool:
        """Whether the call has neither returned nor raised, in whatever thread."""
        if self._frame is None:
            return False
        try:
            # Refuses a frame that runs; one that has ended has nothing left that anybody needs.
            self._frame.clear()
        except RuntimeError:
            return True
        self._frame = None
        return False

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this thread's, and began with `module`."""
        return self.module is module and self.thread is threading.current_thread()

    def check_thread(self) -> None:
        """One thread at a time."""
        if self.thread is not threading.current_thread():
            raise KVSwapError(
                "KVSwapCache: must be used by one thread at a time, got a forward pass in "
                f"{threading.current_thread().name} while one of {self.thread.name} is under way; "
                "open a cache for each thread"
            )

    def fail(self) -> None:
        """The call is about to raise."""
        self._frame = None

    def take_back_others(self) -> None:
        """Layers that are not on disk are as they were before the pass.

        Raises
        ------
        KVSwapError
            A state of fixed size may have changed.
        """
        for layer, length, fields in zip(self._others, self._lengths, self._fields, strict=True):
            if self.positions == 0:
                forget(layer)
                continue
            if fields is not None:
                vars(layer).update(fields)
                continue
            if length is None or isinstance(layer, LinearAttentionCacheLayerMixin):
                self._refuse(layer)
            surplus = layer.get_seq_length() - length
            if surplus <= 0:
                continue
            try:
                layer.crop(-surplus)
            except (AttributeError, NotImplementedError, RuntimeError, ValueError):
                self._refuse(layer)

    @staticmethod
    def _refuse(layer: Any) -> NoReturn:
        raise KVSwapError(
            "KVSwapCache: all layers must hold the same positions, but an earlier forward pass was "
            f"interrupted, and a {type(layer).__name__} has moved on and cannot be taken back; "
            "call reset() and begin again"
        )


@contextlib.contextmanager
def all_or_none(layers: list[Any], call: str, *arguments: Any) -> Iterator[None]:
    """Calls each layer in memory; they are as before where one of them, or the body, fails.

    Such calls replace the layers' tensors and do not write to them.
    """
    fields = [dict(vars(layer)) for layer in layers]
    try:
        for layer in layers:
            getattr(layer, call)(*arguments)
        yield
    except BaseException:
        for layer, before in zip(layers, fields, strict=True):
            vars(layer).update(before)
        raise


def _fields(layer: Any) -> dict[str, Any] | None:
    """What a sliding window is, where it replaces its tensors and does not write to them.

    Both stay until the pass has ended: the memory of one window more.
    """
    if type(layer) is not DynamicSlidingWindowLayer:
        return None
    for side in ("keys", "values"):
        tensor = getattr(layer, side, None)
        # A view of a whole chunk: what is no longer of the window is freed.
        if tensor is not None and tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
            setattr(layer, side, tensor.clone())
    return dict(vars(layer))


def _length(layer: Any) -> int | None:
    """Positions in a layer; None where it has no such thing."""
    return layer.get_seq_length() if hasattr(layer, "get_seq_length") else None


def _call_of(module: nn.Module) -> FrameType | None:
    """The call of `module` that is under way in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        if is_call and frame.f_locals.get("self") is module:
            return frame
        frame = frame.f_back
    return None
