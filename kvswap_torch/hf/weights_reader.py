"""Weights that accelerate keeps on disk, read ahead: a block's while the one before it computes.

accelerate maps a tensor's file when its module runs, so that the processor waits for each page. One
thread here reads whole blocks (a decoder layer, an output layer) into two buffers, past the page
cache where the disk allows it: what is read once per pass leaves nothing there.
"""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvswap_torch.errors import StorageError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.offloaded import held_names, offloading_hooks

ALIGNMENT = 4096  # of offsets, lengths and memory, for reads past the page cache
CHUNK_BYTES = 8 << 20  # of one read, after which it may be given up
GAP_BYTES = 64 << 10  # between two tensors, read along
BUFFERS = 2
THREAD = "kvswap weights"
STACK_DIMENSIONS = 3  # a tensor of so many is a stack of experts

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file of safetensors, and its type in the model."""

    path: str
    begin: int
    end: int
    stored: torch.dtype
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Extent:
    """An aligned part of a file, and where in a buffer it goes."""

    path: str
    begin: int
    end: int
    place: int


class _Block:
    """What one module needs, and where its tensors are in a buffer."""

    def __init__(self, tensors: dict[str, StoredTensor]):
        self.tensors = tensors
        self.extents: list[_Extent] = []
        self.places: dict[str, int] = {}
        self.nbytes = 0
        self._gaps = gap_bytes_max([tensor.end - tensor.begin for tensor in tensors.values()])
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].path, item[1].begin)):
            self._add(name, tensor)

    def _add(self, name: str, tensor: StoredTensor) -> None:
        begin = tensor.begin // ALIGNMENT * ALIGNMENT
        end = -(-tensor.end // ALIGNMENT) * ALIGNMENT
        last = self.extents[-1] if self.extents else None
        gap = 0 if last is None else max(0, begin - last.end)
        is_near = last is not None and last.path == tensor.path and gap <= GAP_BYTES
        if is_near and gap <= self._gaps:
            self._gaps -= gap
            end = max(last.end, end)
            self.extents[-1] = _Extent(last.path, last.begin, end, last.place)
        else:
            self.extents.append(_Extent(tensor.path, begin, end, self.nbytes))
        extent = self.extents[-1]
        self.nbytes = extent.place + extent.end - extent.begin
        self.places[name] = extent.place + tensor.begin - extent.begin


def gap_bytes_max(sizes: list[int]) -> int:
    """The most that is read along with tensors of these sizes: an eighth of them."""
    return min(sum(sizes) // 8, GAP_BYTES * len(sizes))


def block_bytes_max(sizes: list[int]) -> int:
    """The most that a block of tensors of these sizes takes in a buffer, wherever they are."""
    return sum(sizes) + gap_bytes_max(sizes) + 2 * ALIGNMENT * len(sizes)


class _Slot:
    """A buffer, the block that it holds or will hold, and whether all of that is there."""

    def __init__(self, nbytes: int):
        whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        skipped = -whole.data_ptr() % ALIGNMENT
        self.bytes = whole[skipped : skipped + nbytes]
        self.block: int | None = None
        self.is_full = False


class WeightsReader:
    """Reads a model's blocks in the order in which they run, round and round, in its own thread.

    States: begun -> closed, by `close`, or when the model is collected.

    Thread rules: one thread asks; as with accelerate's hooks themselves, one pass at a time.
    """

    def __init__(self, blocks: list[dict[str, StoredTensor]]):
        self._blocks = [_Block(tensors) for tensors in blocks]
        self._of = {name: i for i, block in enumerate(self._blocks) for name in block.tensors}
        self._files: dict[str, tuple[int, int]] = {}  # of a path: descriptor and bytes
        self._slots = [_Slot(self.buffer_bytes) for _ in range(BUFFERS)]
        self._wanted: tuple[int, ...] = ()
        self._errors: dict[int, BaseException] = {}  # of blocks that could not be read
        self._is_closed = False
        self._changed = threading.Condition()
        self._process = os.getpid()
        self.bytes_read = 0
        self.wait_seconds = 0.0  # of what asks, for what was not there yet
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    @property
    def buffer_bytes(self) -> int:
        """Of one of the buffers: the largest block."""
        return max(block.nbytes for block in self._blocks)

    def holds(self, name: str) -> bool:
        return name in self._of

    def begin(self, block: int) -> None:
        """`block` is about to run: it is read, and the one after it."""
        self._check_process()
        self._want(block, self._after(block))

    def end(self, block: int) -> None:
        """`block` has run; its buffer is free for what comes after the next one."""
        following = self._after(block)
        self._want(following, self._after(following))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of a block, once it is there; valid until two blocks further have begun.

        Raises
        ------
        StorageError
            It cannot be read, or this is a forked child.
        """
        self._check_process()
        index = self._of[name]
        block = self._blocks[index]
        with self._changed:
            if index not in self._wanted:
                self._want(index, self._after(index))
            began = time.perf_counter()
            while (slot := self._full_slot(index)) is None:
                if index in self._errors:
                    self._wanted = ()  # the next pass tries again
                    raise self._errors.pop(index)
                if self._is_closed:
                    raise StorageError("weights: the reader is closed; load the model again")
                self._changed.wait()
            self.wait_seconds += time.perf_counter() - began
        told, place = block.tensors[name], block.places[name]
        raw = slot.bytes[place : place + told.end - told.begin]
        # A file begins with text of any length: not all tensors are aligned to their elements.
        if raw.data_ptr() % told.stored.itemsize:
            raw = raw.clone()
        return raw.view(told.stored).view(told.shape).to(told.dtype)

    def close(self) -> None:
        """Ends the thread and frees the buffers. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._slots = []

    def _check_process(self) -> None:
        """A forked child has no thread that reads, and would wait for it for ever."""
        if os.getpid() != self._process:
            raise StorageError(
                "weights: layers on disk must be used by the process that loaded the model, and "
                "this is a fork of it; load the model after the fork"
            )

    def _after(self, block: int) -> int:
        return (block + 1) % len(self._blocks)

    def _want(self, *blocks: int) -> None:
        with self._changed:
            self._wanted = tuple(dict.fromkeys(blocks))
            self._changed.notify_all()

    def _full_slot(self, block: int) -> _Slot | None:
        return next((s for s in self._slots if s.block == block and s.is_full), None)

    # The thread.

    def _run(self) -> None:
        while (work := self._next()) is not None:
            slot, index = work
            try:
                is_whole = self._fill(slot, index)
            except Exception as error:  # raised where the block is used
                is_whole, self._errors[index] = False, error
            with self._changed:
                slot.is_full = is_whole
                slot.block = index if is_whole else None
                self._changed.notify_all()

    def _next(self) -> tuple[_Slot, int] | None:
        """The first block that is wanted and not there, and a buffer of none that is wanted."""
        with self._changed:
            while not self._is_closed:
                held = {slot.block for slot in self._slots}
                missing = [b for b in self._wanted if b not in held and b not in self._errors]
                free = [slot for slot in self._slots if slot.block not in self._wanted]
                if missing and free:
                    slot, index = free[0], missing[0]
                    slot.block, slot.is_full = index, False
                    return slot, index
                self._changed.wait()
        return None

    def _fill(self, slot: _Slot, index: int) -> bool:
        """False: it is no longer wanted."""
        for extent in self._blocks[index].extents:
            for begin in range(extent.begin, extent.end, CHUNK_BYTES):
                with self._changed:
                    if self._is_closed or index not in self._wanted:
                        return False
                end = min(begin + CHUNK_BYTES, extent.end)
                place = extent.place + begin - extent.begin
                self._read(extent.path, begin, slot.bytes[place : place + end - begin])
        return True

    def _read(self, path: str, begin: int, target: torch.Tensor) -> None:
        """Fills `target`, or what of it the file has."""
        descriptor, size = self._file(path)
        view = memoryview(target.numpy())[: size - begin + -size % ALIGNMENT]
        done, wanted = 0, min(len(view), size - begin)
        while done < wanted:
            try:
                count = os.preadv(descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise _failed(path, begin + done, error) from error
            if count == 0 or (done + count < wanted and (done + count) % ALIGNMENT):
                raise StorageError(
                    f"weights: {path} must have {size} bytes, as when it was opened, and ends at "
                    f"byte {begin + done + count}; load the model again"
                )
            done += count
            self.bytes_read += count

    def _file(self, path: str) -> tuple[int, int]:
        if path not in self._files:
            flags = os.O_RDONLY | os.O_CLOEXEC
            try:
                descriptor = os.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise _failed(path, 0, error) from error
                descriptor = os.open(path, flags)  # a file system that has no such reads
            self._files[path] = descriptor, os.fstat(descriptor).st_size
        return self._files[path]


def read_speed(folder: str | Path, most: int = 8 * CHUNK_BYTES) -> float | None:
    """Bytes per second of a folder's largest safetensors file, read past the page cache.

    Returns
    -------
    float or None
        None: there is none of `most` bytes, or the disk has no such reads.
    """
    files = Path(folder).glob("*.safetensors")
    path = max(files, key=lambda file: file.stat().st_size, default=None)
    if path is None or path.stat().st_size < most:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    try:
        buffer, began = mmap.mmap(-1, CHUNK_BYTES), time.perf_counter()  # of whole pages
        for begin in range(0, most, CHUNK_BYTES):
            if os.preadv(descriptor, [buffer], begin) != CHUNK_BYTES:
                return None
        return most / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def _failed(path: str, at: int, error: OSError) -> StorageError:
    return StorageError(
        error.errno, f"weights: cannot be read at byte {at}: {error.strerror}", path
    )


class AheadWeights(Mapping[str, torch.Tensor]):
    """What a hook of accelerate's loads its module's tensors from: the reader's, or the `stored`.

    Parameters
    ----------
    stored
        accelerate's own map of that module, which has a name's beginning as its prefix.
    """

    def __init__(self, reader: WeightsReader, stored: Any):
        self._reader = reader
        self.stored = stored

    def __getitem__(self, name: str) -> torch.Tensor:
        full = f"{self.stored.prefix}{name}"
        return self._reader.tensor(full) if self._reader.holds(full) else self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def read_ahead(model: Any) -> WeightsReader | None:
    """Has a model's offloaded layers read while the ones before them compute.

    Takes memory for the two largest of them. Those whose weights are not in files of safetensors
    go on as accelerate has them, and so do stacks of experts, of which a pass needs few.

    Returns
    -------
    WeightsReader or None
        None: no layer is read so.
    """
    modules = [*model_parts(model).layers]
    head = model.get_output_embeddings()
    modules += [] if head is None else [head]
    headers = _Headers()
    found = [(each, tensors) for each in modules if (tensors := _tensors_of(each, headers))]
    if not found:
        return None
    reader = WeightsReader([tensors for _, tensors in found])
    weakref.finalize(model, reader.close)
    model.weights_reader = reader
    for number, (module, _) in enumerate(found):
        module.register_forward_pre_hook(functools.partial(_begin, reader, number))
        module.register_forward_hook(functools.partial(_end, reader, number), always_call=True)
        for each in module.modules():
            for hook in offloading_hooks(each):
                hook.weights_map = AheadWeights(reader, hook.weights_map)
    return reader


def _begin(reader: WeightsReader, block: int, *_: Any) -> None:
    reader.begin(block)


def _end(reader: WeightsReader, block: int, *_: Any) -> None:
    reader.end(block)


def _tensors_of(module: nn.Module, headers: _Headers) -> dict[str, StoredTensor]:
    """Of a module's offloaded tensors those that are in files of safetensors, by their names."""
    found = {}
    for each in module.modules():
        for hook in offloading_hooks(each):
            weights = hook.weights_map
            index = getattr(getattr(weights, "dataset", None), "index", {})
            for name in held_names(each, hook):
                full = f"{getattr(weights, 'prefix', '')}{name}"
                entry = index.get(full, {})
                if "safetensors_file" in entry:
                    found[full] = headers.located(full, entry)
    return {name: told for name, told in found.items() if len(told.shape) < STACK_DIMENSIONS}


class _Headers:
    """Of files of safetensors, each read once: where data begins, and what is said of tensors."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, dict[str, Any]]] = {}

    def located(self, name: str, entry: Mapping[str, str]) -> StoredTensor:
        """The tensor that accelerate's index has that `entry` of."""
        path = str(entry["safetensors_file"])
        begin, header = self._of(path)
        told = header[entry.get("weight_name", name)]
        stored = _DTYPES[told["dtype"]]
        dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else stored
        first, last = told["data_offsets"]
        return StoredTensor(path, begin + first, begin + last, stored, dtype, tuple(told["shape"]))

    def _of(self, path: str) -> tuple[int, dict[str, Any]]:
        if path not in self._read:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._read[path] = 8 + length, json.loads(file.read(length))
        return self._read[path]
