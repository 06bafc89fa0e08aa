"""Opening a session: from a config and a model's parts to the C++ engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.engine import engine_value, flat_settings
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.placement import local_projections
from kvswap_torch.hf.settings import Budget
from kvswap_torch.native import cache_options
from kvswap_torch.projection import Pair
from kvswap_torch.projection_file import load_projections
from kvswap_torch.sizing import effective_ranks

if TYPE_CHECKING:
    from kvswap_torch._C import TensorCache

ALIGNMENT_OF_MEMORY = 512  # of records that stand there


class WrappedSession:
    """A session that asks a plug-in, too; what it does not have of its own is the session's."""

    def __init__(self, session: Session):
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


Session: TypeAlias = "TensorCache | WrappedSession"
"""What a cache keeps its tokens in."""


class ScoreTerms(NamedTuple):
    """How attention makes scores of products."""

    scale: float
    softcap: float = 0.0  # score = softcap * tanh(score / softcap); 0: not capped
    sinks: torch.Tensor | None = None  # [heads] fp32: a score without a value


def session_options(
    config: SwapConfig,
    parts: ModelParts,
    path: str | Path | None,
    budget: Budget,
    calibrated: bool,
    timeline_spans: int = 0,
) -> dict[str, Any]:
    """The fields of kvswap::CacheOptions by name, settings beside the others."""
    options: dict[str, Any] = flat_settings(config)
    return options | {
        "kv_memory_bytes": budget.kv_memory_bytes,
        "max_context": budget.max_context,
        "max_batch": budget.max_batch,
        "layers": parts.shape.layers,
        "query_heads": parts.shape.heads,
        "kv_heads": parts.shape.kv_heads,
        "head_dim": parts.shape.head_dim,
        "sides": parts.shape.sides,
        "value_dim": parts.shape.value_dim,
        "dtype": parts.dtype,
        "device": str(parts.device),
        "directory": "" if path is None else str(path),
        "ranks": list(effective_ranks(config, parts.shape, calibrated)),
        "timeline_spans": timeline_spans,
    }


def projections_of(config: SwapConfig | None, parts: ModelParts) -> list[Pair] | None:
    """What a config's projection file has of this process's layers and heads.

    As wide as any of the config's solutions wants.
    """
    if config is None or config.summary.projection_file is None:
        return None
    identity = parts.identity
    layers, width = identity.layers, identity.kv_heads * identity.head_dim
    solutions = [each.ranks(layers) for each in (config, *config.solution_configs)]
    widest = [max(ranks) for ranks in zip(*solutions, strict=True)]
    heads = engine_value(config, "heads")
    pairs = load_projections(config.projection_path, widest, width, identity, heads)
    return local_projections(pairs, parts.disk_everywhere, parts.placement)


def open_session(options: dict[str, Any]) -> TensorCache:
    """One of the C++ engine, with these options."""
    from kvswap_torch import _C

    return _C.TensorCache(cache_options(**options))


def alignment_bytes(path: str | Path | None) -> int:
    """What reads and writes in a directory must be aligned to; 4096 where that is not known."""
    from kvswap_torch import _C

    if path is None:
        return ALIGNMENT_OF_MEMORY
    return _C.system_info(str(path)).get("alignment_bytes", 4096)


def memory_need(
    options: dict[str, Any], batch: int, context: int, alignment: int
) -> dict[str, int]:
    """Bytes by use that such a session needs for `batch` sequences of `context` tokens."""
    from kvswap_torch import _C

    return _C.memory_need(cache_options(**options), batch, context, alignment)
