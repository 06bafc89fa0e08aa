"""Settings of a `SwapConfig` that say how a disk is read and written, whatever the method."""

from __future__ import annotations

from dataclasses import dataclass

from kvswap_torch.config_rules import boolean, number, one_of

__all__ = ["DiskSettings"]


@dataclass(frozen=True)
class DiskSettings:
    """Who reads, how, and what is promised of it."""

    reader: str = one_of(
        "auto", ("auto", "uring", "threads", "sync"), "who reads; auto: the fastest that works"
    )
    io_mode: str = one_of(
        "auto", ("auto", "direct", "buffered"), "O_DIRECT or the page cache; auto: O_DIRECT if able"
    )
    read_depth: int = number(64, 1, 1024, "reads in flight at once")
    merge_gap_bytes: int = number(
        16 << 10, 0, 1 << 24, "neighbouring reads are merged over a gap up to this"
    )
    merge_bytes_max: int = number(256 << 10, 4096, 1 << 28, "longest merged read")
    checksum: bool = boolean(True, "verify every record that is read")
    io_timeout_seconds: int = number(
        60, 0, 1 << 24, "a read or write without progress for longer is an error; 0: never"
    )
    wipe_on_close: bool = boolean(
        False,
        "overwrite what was written to the file, the pages and the write buffers with zeros before "
        "they are given back; close() then takes as long as writing the file again",
    )
    device_model: str | None = one_of(
        None,
        (None, "nvme", "ufs", "emmc"),
        "delay reads as a modelled device would, for experiments; None: the real disk only",
    )
    disk_quota_bytes: int | None = number(
        None, 1, 2**63 - 1, "most bytes on disk; None: what the disk has free"
    )
