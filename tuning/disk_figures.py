"""What a disk does: figures of random reads by size and depth, and the file they are kept in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvswap_torch.errors import ConfigError


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

    def best_bytes_per_s(self) -> float:
        """The highest bandwidth met."""
        return max(cell.bytes_per_s for cell in self.cells)


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
