"""With which settings kvswap and its token-by-token variants run in a cell, at equal memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import ROOM_TOKENS, SELECTED_TOKENS
from bench.side_by_side.plan import Cell
from kvswap_torch import SwapConfig
from kvswap_torch.config import Memory, Prefetch, Selection, Storage, Summary
from kvswap_torch.hf import session as session_module
from kvswap_torch.hf.families import ModelParts, model_parts
from kvswap_torch.hf.lookahead import SUMMED_BUDGET_SHARE, LookAhead
from kvswap_torch.hf.settings import Budget
from kvswap_torch.sizing import Request, fit_budget

RANK = 32  # columns of kvswap's summary; half of it where that does not fit
PAGES_OF_GROUPS = 4  # the reuse buffer holds at most so many steps' choices


@dataclass(frozen=True)
class Fitted:
    """Settings, None for a cache's own choice, and the budget that they were fitted to, bytes.

    The budget is a 13th of the full cache, or what the smallest settings that still attend
    `SELECTED_TOKENS` tokens need where that is more.
    """

    config: SwapConfig | None
    budget_bytes: int


def fit_kvswap(model: Any, cell: Cell, path: Path) -> Fitted:
    parts = model_parts(model)
    alignment = session_module.alignment_bytes(path)
    context, batch = cell.context + ROOM_TOKENS, cell.batch

    def need(config: SwapConfig) -> int:
        options = session_module.session_options(
            config, parts, path, Budget(None, context, batch), False
        )
        return session_module.memory_need(options, batch, context, alignment)["total"]

    base = _base(cell, cell.group_tokens)
    int8 = {"summary.dtype": "int8"}
    half = int8 | {"summary.rank": RANK // 4}
    candidates = [base.with_settings(each) for each in ({}, int8, half)]
    left = cell.budget_bytes - LookAhead(parts, cell.budget_bytes).nbytes
    for config in candidates:
        if need(_least_pages(config)) <= left:
            return Fitted(config, cell.budget_bytes)
    least = _least_pages(candidates[-1])
    return Fitted(least, _with_predictor(need(least), parts))


def fit_per_head(model: Any, cell: Cell, path: Path, budget_bytes: int, reuse: bool) -> Fitted:
    """One token a group and a quarter of a head's channels to score by, as InfiniGen keeps."""
    parts = model_parts(model)
    alignment = session_module.alignment_bytes(path)
    context, batch = cell.context + ROOM_TOKENS, cell.batch
    left = budget_bytes - LookAhead(parts).nbytes

    def need(config: SwapConfig) -> Mapping[str, int]:
        options = session_module.session_options(
            config, parts, path, Budget(None, context, batch), False
        )
        return session_module.memory_need(options, batch, context, alignment)

    head_dim = parts.shape.head_dim
    base = _base(cell, 1).with_settings(
        {
            "selection.heads": "per_head",
            "summary.dtype": "int8",
            "summary.rank": max(1, head_dim // 8),
        }
    )
    if not reuse:
        base = _least_pages(base).with_settings({"memory.replacement": "no_reuse"})
    candidates = [base, base.with_settings({"summary.rank": max(1, head_dim // 16)})]
    for config in candidates:
        if need(_least_pages(config))["total"] <= left:
            request = Request(left, context, batch)
            return Fitted(fit_budget(request, parts.shape, config, need), budget_bytes)
    least = _least_pages(candidates[-1])
    return Fitted(least, need(least)["total"] + LookAhead(parts).nbytes)


def _base(cell: Cell, group_tokens: int) -> SwapConfig:
    groups = SELECTED_TOKENS // group_tokens
    return SwapConfig(
        # The rank is doubled by a cache that has no projection file; the paper's score.
        summary=Summary(rank=RANK // 2),
        selection=Selection(
            group_tokens=group_tokens,
            score="logit_sum",
            top_k_groups=groups,
            max_step_tokens=1,
        ),
        prefetch=Prefetch(mode="trust"),
        memory=Memory(pages_per_layer=PAGES_OF_GROUPS * groups),
        storage=Storage(simulated_device=cell.device),
    )


def _least_pages(config: SwapConfig) -> SwapConfig:
    return config.with_settings({"memory.pages_per_layer": config.selection.top_k_groups})


def _with_predictor(need: int, parts: ModelParts) -> int:
    """A cache sums the predictor's projections only where they are a small part of its budget."""
    summed = LookAhead(parts).nbytes
    whole = need + summed
    return whole if summed <= whole // SUMMED_BUDGET_SHARE else need
