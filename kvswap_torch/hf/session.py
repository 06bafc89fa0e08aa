"""Opening a session: from a config and a model's parts to the C++ engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvswap_torch.config import SwapConfig
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.sizing import effective_ranks

# Options that a config and a session have under the same name.
SHARED = (
    "io_mode",
    "reader",
    "read_depth",
    "merge_gap_bytes",
    "merge_bytes_max",
    "checksum",
    "group_tokens",
    "summary_dtype",
    "groups_max",
    "pages_max",
    "sink_tokens",
    "tail_tokens",
    "replacement",
    "select_queries_max",
)
OPTIONAL = ("disk_quota_bytes", "kv_memory_bytes", "max_context", "max_batch")


def session_options(
    config: SwapConfig,
    parts: ModelParts,
    path: str | Path,
    *,
    calibrated: bool,
    kv_memory_bytes: int | None,
    max_context: int | None,
    max_batch: int | None,
) -> dict[str, Any]:
    """The fields of kvswap::SessionOptions by name."""
    options: dict[str, Any] = {name: getattr(config, name) for name in SHARED}
    limits = (config.disk_quota_bytes, kv_memory_bytes, max_context, max_batch)
    options |= {
        name: -1 if value is None else value for name, value in zip(OPTIONAL, limits, strict=True)
    }
    return options | {
        "layers": parts.shape.layers,
        "heads": parts.shape.heads,
        "kv_heads": parts.shape.kv_heads,
        "head_dim": parts.shape.head_dim,
        "dtype": parts.dtype,
        "directory": str(path),
        "device_model": config.device_model or "",
        "ranks": list(effective_ranks(config, parts.shape, calibrated)),
    }


def open_session(options: dict[str, Any]) -> Any:
    """A `kvswap_torch._C.Session` with these options."""
    from kvswap_torch import _C

    native = _C.SessionOptions()
    for name, value in options.items():
        setattr(native, name, value)
    return _C.Session(native)
