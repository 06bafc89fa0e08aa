"""What a cache takes, in memory, with settings that are tried."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf import session as session_module
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.hf.plug_ins import PlugIns
from kvswap_torch.hf.settings import Budget

Found = TypeVar("Found")


class CacheNeed:
    """(settings, sequences, tokens of each) -> bytes by use; "total", and "least" that holds it.

    Parameters
    ----------
    parts
        The model; its weights may be missing.
    path
        The cache's folder; None: it is in memory.
    look_ahead
        What predicts queries; `search` may take its sums of projections apart.
    calibrated
        Projections come from a file. Those of the prompt's own have twice the columns.
    plug_ins
        They are opened with each of the settings, which may say what they keep.
    """

    def __init__(
        self,
        parts: ModelParts,
        path: str | None,
        budget: Budget,
        look_ahead: LookAhead,
        *,
        calibrated: bool,
        timeline_spans: int = 0,
        plug_ins: PlugIns | None = None,
    ):
        self._parts, self._path, self._budget = parts, path, budget
        self._look_ahead, self._plug_ins = look_ahead, plug_ins or PlugIns()
        self._calibrated, self._timeline_spans = calibrated, timeline_spans

    def __call__(self, config: SwapConfig, batch: int, context: int) -> dict[str, int]:
        self._plug_ins.open(config, self._parts)
        beside = self.beside(config, batch, context)
        taken = sum(beside.values())
        options = self.options(config, taken)
        uses = session_module.memory_need(options, batch, context, self._alignment)
        return uses | beside | {name: uses[name] + taken for name in ("total", "least")}

    def beside(self, config: SwapConfig, batch: int, context: int) -> dict[str, int]:
        """Bytes of the budget that others than the session take."""
        predictor = self._look_ahead.nbytes if config.predicts else 0
        uses = {"predictor": predictor, "plug_in": self._plug_ins.nbytes(batch, context)}
        index = self._parts.index_bytes(batch, context)
        return uses | ({"index": index} if index else {})

    def options(self, config: SwapConfig, beside: int) -> dict[str, Any]:
        """Of a session that has what so many bytes leave of the budget."""
        budget = self._budget
        if budget.kv_memory_bytes is not None:
            left = max(1, budget.kv_memory_bytes - beside)
            budget = dataclasses.replace(budget, kv_memory_bytes=left)
        options = session_module.session_options(
            config, self._parts, self._path, budget, self._calibrated, self._timeline_spans
        )
        return options | ({"tells_attention": True} if self._plug_ins.sees_attention else {})

    @functools.cached_property
    def _alignment(self) -> int:
        return session_module.alignment_bytes(self._path)

    def search(self, settled: Callable[[], Found]) -> Found:
        """What `settled` finds by this need; where it fits in no other way, without summed queries.

        Raises
        ------
        BudgetError
            When it does not fit so either.
        """
        try:
            return settled()
        except BudgetError:
            if not self._look_ahead.take_apart():
                raise
            return settled()
