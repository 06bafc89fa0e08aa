"""The least memory that the tuner's settings need, known before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.sizing import ModelShape, Request, too_small
from kvswap_torch.tuning.choices import TOKENS_SHARES
from kvswap_torch.tuning.recall import RANKS, Choice
from kvswap_torch.tuning.session_need import Demand, engine_need

RECORD_WASTE_MAX = 1.5  # bytes read for each byte wanted


def usable_sizes(sizes: Sequence[int], shape: ModelShape, alignment: int) -> list[int]:
    """Group sizes whose records are not mostly padding."""
    token = 2 * shape.width * shape.element_bytes

    def waste(size: int) -> float:
        return -(-size * token // alignment) * alignment / (size * token)

    return [size for size in sizes if waste(size) <= RECORD_WASTE_MAX] or [max(sizes)]


def check_budget(
    model: Any,
    context_max: int,
    batch_max: int,
    budget_bytes: int,
    path: Path,
    choice: Choice,
    sizes: Sequence[int],
) -> None:
    """Refuses, before anything is measured, a budget that no settings of the tuner's fit in.

    Raises
    ------
    BudgetError
        Names the minimum, what it is made of and what to lower.
    """
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.session import alignment_bytes

    shape = model_parts(model).shape
    alignment = alignment_bytes(path)
    request = Request(budget_bytes, context_max, batch_max)
    need = engine_need(model, Demand(context_max, batch_max, budget_bytes), alignment)
    tokens = int(choice.group_tokens * choice.groups_max * min(TOKENS_SHARES))
    smallest = [
        SwapConfig(
            group_tokens=size,
            rank=min(RANKS[0], shape.width),
            summary_dtype="int8",
            groups_max=max(1, tokens // size),
            pages_max=max(tokens // size, SwapConfig().select_queries_max),
            score=choice.score,
            sink_tokens=choice.sink_tokens,
            tail_tokens=choice.tail_tokens,
        )
        for size in usable_sizes(sizes, shape, alignment)
    ]
    least = min(smallest, key=lambda config: need(config)["total"])
    if need(least)["total"] > budget_bytes:
        raise BudgetError(too_small(request, need(least), least))
