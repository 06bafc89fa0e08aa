"""What follows from the settings of a `SwapConfig`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kvswap_torch.config_parts import Solution, nearest
from kvswap_torch.errors import ConfigError

if TYPE_CHECKING:
    from kvswap_torch.config import SwapConfig

__all__ = ["ConfigFacts"]


class ConfigFacts:
    """Questions that a config answers; it has the fields."""

    rows: str
    keeper: str
    heads: str
    rank: int | tuple[int, ...]
    projection_kind: str
    exact_layers: tuple[int, ...]
    projection_file: str | None
    table: tuple[Solution, ...]
    source: Path | None

    @property
    def takes_projections(self) -> bool:
        """Does a layer need a pair of projections before it can choose?"""
        return self.rows == "low_rank"

    def is_exact(self, layer: int) -> bool:
        """Does this layer on disk attend everything, whatever its queries are?"""
        return (self.rows == "none" and self.keeper == "none") or layer in self.exact_layers

    @property
    def doubles_estimates(self) -> bool:
        """Does a projection from the prompt get twice the columns? Blocks are published without."""
        return self.projection_kind in ("query_aware", "svd_keys")

    def row_heads(self, kv_heads: int) -> int:
        """How many of a model's KV heads choose together."""
        return 1 if self.heads == "each" else kv_heads

    def ranks(self, layers: int) -> tuple[int, ...]:
        """The rank of each of `layers` layers.

        Raises
        ------
        ConfigError
            When there is one rank a layer, for another number of layers.
        """
        if isinstance(self.rank, int):
            return (self.rank,) * layers
        if len(self.rank) != layers:
            raise ConfigError(
                f"rank: must be one number or {layers}, one for each layer on disk, got "
                f"{len(self.rank)}"
            )
        return self.rank

    def for_batch_and_context(self, batch: int, context: int) -> SwapConfig:
        """The config for a run, without a table: the exact pair's solution, or the nearest's.

        Near is measured in doublings of batch plus doublings of context; of two equally near the
        one with the longer context, then the larger batch, is taken, which reads less than it may
        rather than more. Without a table the config itself is returned.

        Raises
        ------
        ConfigError
            When batch or context is not positive.
        """
        if batch < 1 or context < 1:
            raise ConfigError(
                f"for_batch_and_context: both must be positive, got {batch} and {context}"
            )
        return self._with(nearest(self.table, batch, context)) if self.table else self

    def _with(self, row: Solution) -> SwapConfig:
        return dataclasses.replace(self, **dict(row.settings), table=())

    @property
    def projection_path(self) -> Path | None:
        """Where the projection file is; None when there is none.

        Raises
        ------
        ConfigError
            When the config was not loaded from or saved to a file, so that there is no folder to
            look in.
        """
        if self.projection_file is None:
            return None
        if self.source is None:
            raise ConfigError(
                "projection_file: is relative to the config's file, but this config was not loaded "
                "from one; use SwapConfig.load(), or pass source="
            )
        return self.source.parent / self.projection_file
