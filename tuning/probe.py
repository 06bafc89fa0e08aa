"""Measures the disk that a KV cache is to live on, with the reader that a session uses."""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.tuning.disk import DiskFigures, ReadCell
from kvswap_torch.tuning.progress import Progress

__all__ = ["DEVICES", "DiskFigures", "ReadCell", "probe_disk"]

DEVICES = ("nvme", "ufs", "ufs3", "emmc")
BLOCKS = tuple(1024 << power for power in range(11))  # 1 KiB to 1 MiB; a group may be that small
DEPTHS = (1, 2, 4, 8, 16, 32, 64)

SCRATCH_BYTES = 4 << 30  # far more than the memory of any disk's controller
SCRATCH_BYTES_FEW = 256 << 20  # where no controller can hide anything: in memory, or modelled
SCRATCH_BYTES_MIN = 64 << 20  # below it there is no sense in random places
SCRATCH_BYTES_SURE = 1 << 30  # below it a disk's own memory may answer
FILL_SHARE = 0.3  # of the time, at most
CELL_SECONDS_MAX = 0.3
CELL_SECONDS_MIN = 0.01
CELLS_MIN = len(DEPTHS) + 1  # measured even when time is up: two sizes, or nothing can be fitted
SLOW_CELL_SECONDS = 2.0  # a cell whose few batches would take longer is left out
BATCHES_MIN = 4  # of a cell, however short: to warm up, two that count, one for latencies


def probe_disk(
    path: str | Path,
    *,
    device: str = "",
    seconds: float = 40.0,
    progress: Progress | None = None,
) -> DiskFigures:
    """Bandwidth and latency of random reads, by size and depth, in the folder `path`.

    A scratch file without a name is written there and read from; it is gone when this returns or
    raises, and when the process is killed. It takes at most 4 GiB and half of what is free.

    Parameters
    ----------
    device
        A modelled device (`DEVICES`) whose reads are measured instead: nothing is read then, and
        only the write bandwidth is that of the disk.
    seconds
        Time to take, about. A disk so slow that few large reads take longer makes it longer.

    Raises
    ------
    StorageError
        When the folder is missing, not writable or too full, or when the disk fails.
    ConfigError
        When `device` or `seconds` makes no sense.
    """
    folder = _checked(path, device, seconds)
    plan = _Plan(folder, device, progress or _silent)
    probe = _open(str(folder), device, plan.scratch_bytes)
    # Not before: what is loaded for it may take long on a busy machine.
    started = time.monotonic()
    plan.deadline = started + seconds
    try:
        plan.warn_of(probe)
        write_bytes_per_s = plan.fill(probe, started + FILL_SHARE * seconds)
        cells = plan.measure(probe)
        return DiskFigures(
            cells=tuple(cells),
            write_bytes_per_s=write_bytes_per_s,
            direct=probe.direct,
            reader=probe.reader,
            device=device,
            scratch_bytes=probe.filled_bytes,
            alignment_bytes=probe.alignment_bytes,
            seconds=time.monotonic() - started,
            warnings=tuple(plan.warnings),
        )
    finally:
        # Not left to the garbage collector: a traceback would keep the file.
        probe.close()


def _open(folder: str, device: str, scratch_bytes: int) -> Any:
    import torch  # noqa: F401  # its libraries are needed

    from kvswap_torch import _C

    return _C.DiskProbe(folder, device, scratch_bytes)


def _checked(path: str | Path, device: str, seconds: float) -> Path:
    if device and device not in DEVICES:
        raise ConfigError(f"probe: device must be empty or one of {DEVICES}, got {device!r}")
    if not seconds > 0:
        raise ConfigError(f"probe: seconds must be positive, got {seconds}")
    folder = Path(path)
    if not folder.is_dir():
        code = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise StorageError(
            code, f"probe: path must be an existing folder, got {str(path)!r}; create it"
        )
    return folder


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass
class _Plan:
    """What is measured, in which time, and what must be said about it."""

    folder: Path
    device: str
    progress: Progress
    deadline: float = 0.0
    warnings: list[str] = field(default_factory=list)
    scratch_bytes: int = 0

    def __post_init__(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < 2 * SCRATCH_BYTES_MIN:
            raise StorageError(
                errno.ENOSPC,
                f"probe: '{self.folder}' must have {format_bytes(2 * SCRATCH_BYTES_MIN)} free for "
                f"a scratch file of half of that, got {format_bytes(free)}; free space or choose "
                "another path",
            )
        wanted = SCRATCH_BYTES_FEW if self.device else SCRATCH_BYTES
        self.scratch_bytes = min(wanted, free // 2)

    def warn_of(self, probe: Any) -> None:
        """What is known before anything is measured."""
        if probe.in_memory:
            self.scratch_bytes = min(self.scratch_bytes, SCRATCH_BYTES_FEW)
            where = "only the write bandwidth" if self.device else "every figure"
            self.warnings.append(
                f"'{self.folder}' lies in memory: {where} is of memory, not of a disk; choose a "
                "folder on the disk that the KV cache is to use"
            )
        elif not probe.direct and not self.device:
            self.warnings.append("All figures are of buffered reads, through the page cache.")
        self.warnings += probe.fallbacks
        if self.device:
            self.warnings.append(
                f"All reads are of the modelled device {self.device}; the write bandwidth is of "
                "the disk below the folder, since the models have none."
            )

    def fill(self, probe: Any, until: float) -> float:
        """Writes the scratch file; returns bytes a second."""
        spent = 0.0
        while probe.filled_bytes < self.scratch_bytes:
            late = time.monotonic() > until
            enough = SCRATCH_BYTES_MIN if time.monotonic() < self.deadline else 1
            if late and probe.filled_bytes >= enough:
                break
            try:
                written, took = probe.fill()
            except StorageError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not full or probe.filled_bytes < SCRATCH_BYTES_MIN:
                    raise
                self.warnings.append(f"The disk became full while it was measured: {error}")
                break
            if written == 0:
                break
            spent += took
            self.progress("writing the scratch file", probe.filled_bytes, self.scratch_bytes)
        spent += probe.sync()
        few = self.device or probe.in_memory
        if probe.filled_bytes < SCRATCH_BYTES_SURE and not few:
            self.warnings.append(
                f"The scratch file has only {format_bytes(probe.filled_bytes)}, for lack of room "
                "or time: a disk with that much memory of its own reads less fast than measured."
            )
        return probe.filled_bytes / spent

    def measure(self, probe: Any) -> list[ReadCell]:
        """Every size at every depth, the small ones first."""
        blocks = [block for block in BLOCKS if block % probe.alignment_bytes == 0]
        grid = [(block, depth) for block in blocks for depth in DEPTHS]
        cells: list[ReadCell] = []
        fastest = 0.0
        for number, (block, depth) in enumerate(grid):
            self.progress("reading", number, len(grid))
            left = self.deadline - time.monotonic()
            least = BATCHES_MIN * block * depth / fastest if fastest else 0.0
            too_late = left <= 0 or least > SLOW_CELL_SECONDS
            if block > probe.filled_bytes or (len(cells) >= CELLS_MIN and too_late):
                continue
            share = left / (len(grid) - number)
            share = min(max(share, CELL_SECONDS_MIN), CELL_SECONDS_MAX)
            cell = ReadCell(block, depth, *probe.measure(block, depth, share))
            fastest = max(fastest, cell.bytes_per_s)
            cells.append(cell)
        self.progress("reading", len(grid), len(grid))
        if len(cells) < len(grid):
            self.warnings.append(
                f"{len(grid) - len(cells)} of {len(grid)} sizes and depths were left out, for lack "
                "of time or because the disk cannot read them."
            )
        return cells
