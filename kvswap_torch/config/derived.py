"""What follows from the settings of a `SwapConfig`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvswap_torch.config.solution import Solution, nearest
from kvswap_torch.errors import ConfigError

if TYPE_CHECKING:
    from kvswap_torch.config.blocks import Prefetch, Selection, Summary
    from kvswap_torch.config.retention import Retention
    from kvswap_torch.config.swap_config import SwapConfig

__all__ = ["ConfigFacts"]


class ConfigFacts:
    """Questions that a config answers; it has the fields."""

    summary: Summary
    selection: Selection
    prefetch: Prefetch
    retention: Retention | None
    solutions: tuple[Solution, ...]
    source: Path | None

    @property
    def ranks_by_sum(self) -> bool:
        """Are groups ranked by a sum of logits, for which the sum of all queries is enough?"""
        return self.takes_projections and self.selection.score == "logit_sum"

    @property
    def predicts(self) -> bool:
        """Are queries predicted, for the prefetch alone or for the selection?"""
        return self.prefetch.mode != "off"

    @property
    def takes_projections(self) -> bool:
        """Does a layer need a pair of projections before it can choose?"""
        return self.summary.kind == "low_rank"

    def is_exact(self, layer: int) -> bool:
        """Does this layer on disk attend everything, whatever its queries are?"""
        is_whole = self.summary.kind == "none" and self.retention is None
        return is_whole or layer in self.selection.dense_layers

    @property
    def doubles_estimates(self) -> bool:
        """Is an estimated projection's rank doubled? Blocks are published without."""
        return self.summary.projection in ("query_aware", "svd_keys")

    def row_heads(self, kv_heads: int) -> int:
        """How many of a model's KV heads choose together."""
        return 1 if self.selection.heads == "per_head" else kv_heads

    def ranks(self, layers: int) -> tuple[int, ...]:
        """The rank of each of `layers` layers.

        Raises
        ------
        ConfigError
            When there is one rank a layer, for another number of layers.
        """
        rank = self.summary.rank
        if isinstance(rank, int):
            return (rank,) * layers
        if len(rank) != layers:
            raise ConfigError(
                f"summary.rank: must be one number or {layers}, one for each layer on disk, got "
                f"{len(rank)}"
            )
        return rank

    def for_batch_and_context(self, batch: int, context: int) -> SwapConfig:
        """The config for a run, without solutions: the exact pair's solution, or the nearest's.

        Near is measured in doublings of batch plus doublings of context; of two equally near the
        one with the longer context, then the larger batch, is taken, which reads less than it may
        rather than more. Without solutions the config itself is returned.

        Raises
        ------
        ConfigError
            When batch or context is not positive.
        """
        if batch < 1 or context < 1:
            raise ConfigError(
                f"for_batch_and_context: both must be positive, got {batch} and {context}"
            )
        if not self.solutions:
            return cast("SwapConfig", self)
        return self._with(nearest(self.solutions, batch, context))

    @property
    def solution_configs(self) -> tuple[SwapConfig, ...]:
        """Each solution as a config without solutions."""
        return tuple(map(self._with, self.solutions))

    def _with(self, row: Solution) -> SwapConfig:
        plain = dataclasses.replace(cast("SwapConfig", self), solutions=())
        return plain.with_settings(dict(row.settings))

    @property
    def projection_path(self) -> Path | None:
        """Where the projection file is; None when there is none.

        Raises
        ------
        ConfigError
            When the config was not loaded from or saved to a file, so that there is no folder to
            look in.
        """
        if self.summary.projection_file is None:
            return None
        if self.source is None:
            raise ConfigError(
                "summary.projection_file: is relative to the config's file, but this config was "
                "not loaded from one; use SwapConfig.load(), or pass source="
            )
        return self.source.parent / self.summary.projection_file
