"""What a disk does: figures of random reads, and a model of four numbers fitted to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from kvswap_torch.errors import ConfigError
from kvswap_torch.tuning.step_model import descend


@dataclass(frozen=True)
class ReadCell:
    """Random reads of one size, so many at a time.

    Parameters
    ----------
    bytes_per_s
        Of `depth` reads submitted together and waited for together, again and again: what a step
        of a layer does.
    latency_s, latency_p99_s
        Of one read with `depth` always in flight: the median, and what 1 % exceed.
    """

    block_bytes: int
    depth: int
    bytes_per_s: float
    latency_s: float
    latency_p99_s: float


@dataclass(frozen=True)
class DiskFigures:
    """What `probe_disk` measured.

    Parameters
    ----------
    write_bytes_per_s
        Of writing the scratch file from one end to the other.
    direct
        O_DIRECT; otherwise the page cache was passed through.
    reader
        Who read: "uring", "threads", "sync"; of a modelled device "emmc(model)".
    device
        The modelled device; empty: the disk as it is.
    scratch_bytes
        Size of the file that was read from.
    alignment_bytes
        Of reads and writes.
    seconds
        How long measuring took.
    """

    cells: tuple[ReadCell, ...]
    write_bytes_per_s: float
    direct: bool
    reader: str
    device: str
    scratch_bytes: int
    alignment_bytes: int
    seconds: float
    warnings: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "write_bytes_per_s", four_digits(self.write_bytes_per_s))
        object.__setattr__(self, "seconds", round(self.seconds, 1))
        object.__setattr__(self, "cells", tuple(_rounded(cell) for cell in self.cells))
        object.__setattr__(self, "warnings", tuple(self.warnings))

    def to_json(self) -> dict[str, Any]:
        """Plain values; all floats have four digits, so that they survive any JSON writer."""
        plain = dataclasses.asdict(self)
        return plain | {"cells": list(plain["cells"]), "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> DiskFigures:
        """The figures that `to_json` wrote.

        Raises
        ------
        ConfigError
            When a name is missing or foreign.
        """
        try:
            cells = tuple(ReadCell(**cell) for cell in plain["cells"])
            return cls(**{**plain, "cells": cells, "warnings": tuple(plain["warnings"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"disk figures: must be what DiskFigures.to_json() gives, got {plain!r} ({error})"
            ) from error


def four_digits(value: float) -> float:
    """`value` with four significant digits."""
    return float(f"{value:.4g}")


def _rounded(cell: ReadCell) -> ReadCell:
    return dataclasses.replace(
        cell,
        bytes_per_s=four_digits(cell.bytes_per_s),
        latency_s=four_digits(cell.latency_s),
        latency_p99_s=four_digits(cell.latency_p99_s),
    )


NEGLIGIBLE = 1e-9  # seconds


@dataclass(frozen=True)
class DiskModel:
    """Reads that are submitted together either queue or stream.

    n records of s bytes take the longer of ``n * request_s`` and ``latency_s + n * s /
    bytes_per_s``, and ``n * read_s`` besides. A device that serves a few requests at once is bound
    by the first or the second; where one processor hands the reads over and takes them back, as in
    a virtual machine, the last counts.

    Parameters
    ----------
    request_s
        Between two requests that the device is done with, however small they are.
    latency_s
        Of one read on an idle device, its transfer apart.
    bytes_per_s
        Of large reads.
    read_s
        What each read costs and nothing else hides.
    residual
        Median relative error over the cells it was fitted to.
    """

    request_s: float
    latency_s: float
    bytes_per_s: float
    read_s: float = 0.0
    residual: float = 0.0

    def __post_init__(self) -> None:
        if min(self.request_s, self.latency_s, self.read_s) < 0 or not self.bytes_per_s > 0:
            raise ConfigError(
                "disk model: the times must be at least 0 and bytes_per_s positive, got "
                f"{self.request_s}, {self.latency_s}, {self.read_s} and {self.bytes_per_s}"
            )

    @classmethod
    def fit(cls, figures: DiskFigures) -> DiskModel:
        """The model with the least mean error over all cells, in relative terms.

        Raises
        ------
        ConfigError
            When there are fewer than four cells, the model's numbers.
        """
        return fit_cells(figures.cells)

    def seconds(self, count: float, record_bytes: float) -> float:
        """From submitting `count` records of `record_bytes` until all are there; 0 for none."""
        if count <= 0:
            return 0.0
        stream = self.latency_s + count * record_bytes / self.bytes_per_s
        return max(count * self.request_s, stream) + count * self.read_s

    def to_json(self) -> dict[str, float]:
        """Plain floats of four digits, as the model has them when it was fitted."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> DiskModel:
        """The model that `to_json` wrote."""
        return cls(**plain)


def fit_cells(cells: Sequence[ReadCell]) -> DiskModel:
    """`DiskModel.fit`; a cell's batch is its depth."""
    if len(cells) < 4:
        raise ConfigError(f"disk model: must be fitted to at least 4 cells, got {len(cells)}")
    measured = [(cell.depth, cell.block_bytes, cell_seconds(cell)) for cell in cells]

    def model(logs: Sequence[float]) -> DiskModel:
        return DiskModel(*(math.exp(value) for value in logs))

    def loss(logs: Sequence[float]) -> float:
        tried = model(logs)
        return sum(
            abs(math.log(tried.seconds(count, size) / seconds)) for count, size, seconds in measured
        )

    request = min(seconds / count for count, _, seconds in measured)
    latency = min(seconds for _, _, seconds in measured)
    bandwidth = max(cell.bytes_per_s for cell in cells)
    # A device that is bound by its queue, and one that is bound by the thread that submits reads.
    starts = (
        (request, latency, bandwidth, request / 100),
        (request / 2, latency, bandwidth, request / 2),
    )
    found = [descend(loss, [math.log(value) for value in start]) for start in starts]
    numbers = [math.exp(value) for value in min(found, key=loss)]
    numbers = [four_digits(value) if value > NEGLIGIBLE else 0.0 for value in numbers]
    fitted = DiskModel(*numbers)
    errors = [abs(fitted.seconds(count, size) / seconds - 1) for count, size, seconds in measured]
    return replace(fitted, residual=four_digits(median(errors)))


def cell_seconds(cell: ReadCell) -> float:
    """What a batch of the cell took."""
    return cell.depth * cell.block_bytes / cell.bytes_per_s
