"""What a cache that is not open yet would take, as `SessionDriver` counts it of an open one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.hf.session import memory_need, session_options
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
    given
        What the cache is given, before a budget lowers it; None: the defaults.
    calibrated
        Projections come from a file. Those of the prompt's own have twice the columns.
    alignment
        Of reads of the disk, in bytes.
    """

    def __init__(
        self,
        parts: ModelParts,
        path: str | None,
        budget: Budget,
        given: SwapConfig | None,
        *,
        calibrated: bool,
        alignment: int,
        timeline_spans: int = 0,
    ):
        self._parts, self._path, self._budget = parts, path, budget
        self._calibrated, self._alignment = calibrated, alignment
        self._timeline_spans = timeline_spans
        by_sum = (given or SwapConfig()).ranks_by_sum
        self._ahead = LookAhead(parts, budget.kv_memory_bytes, by_sum)

    def __call__(self, config: SwapConfig, batch: int, context: int) -> dict[str, int]:
        predictor = self._ahead.nbytes if config.predicts else 0
        index = self._parts.index_bytes(batch, context)
        options = session_options(
            config,
            self._parts,
            self._path,
            self._left(predictor + index),
            self._calibrated,
            self._timeline_spans,
        )
        uses = memory_need(options, batch, context, self._alignment)
        grown = {name: uses[name] + predictor + index for name in ("total", "least")}
        beside = {"predictor": predictor} | ({"index": index} if index else {})
        return uses | beside | grown

    def _left(self, beside: int) -> Budget:
        if self._budget.kv_memory_bytes is None:
            return self._budget
        left = max(1, self._budget.kv_memory_bytes - beside)
        return dataclasses.replace(self._budget, kv_memory_bytes=left)

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
            if not self._ahead.take_apart():
                raise
            return settled()
