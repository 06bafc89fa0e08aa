"""What a session of the executable specification is opened with, and what it counts."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

import torch

from kvswap_torch.config.engine import NAMES, default_of

Options = make_dataclass(
    "Options",
    [
        ("layers", int, 0),
        ("query_heads", int, 0),
        ("kv_heads", int, 0),
        ("head_dim", int, 0),
        ("sides", int, 2),
        ("value_dim", int, 0),
        ("dtype", torch.dtype, torch.float32),
        ("device", str, "cpu"),
        ("directory", str, ""),
        ("ranks", list, field(default_factory=list)),
        ("kv_memory_bytes", int | None, None),
        ("max_context", int | None, None),
        ("max_batch", int | None, None),
        ("timeline_spans", int, 0),
        *((name, Any, default_of(name)) for name in NAMES),
    ],
    namespace={"__doc__": "The fields of `_C.CacheOptions`: the table's settings and the rest."},
)


COUNTERS = [
    "steps",
    "sequences",
    "groups_attended",
    "groups_loaded",
    "record_bytes",
    "bytes_read",
    "bytes_written",
    "bytes_on_disk",
    "wait_seconds",
    "hidden_seconds",
    "write_blocked_seconds",
    "device_bytes",
    "pinned_bytes",
    "copied_bytes",
    "copy_seconds",
    "device_wait_seconds",
    "choice_wait_seconds",
]
