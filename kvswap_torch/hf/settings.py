"""Which settings a cache runs with, from what its user said."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvswap_torch.config import SwapConfig
from kvswap_torch.sizing import ModelShape, fit_budget


@dataclass(frozen=True)
class Budget:
    """What the user promised and asked for; None: not said."""

    kv_memory_bytes: int | None = None
    max_context: int | None = None
    max_batch: int | None = None

    @property
    def is_known(self) -> bool:
        return self.max_context is not None and self.max_batch is not None

    def matters(self, config: SwapConfig | None) -> bool:
        """Whether the settings depend on batch and context at all."""
        return self.kv_memory_bytes is not None or bool(config is not None and config.table)


def settle(
    config: SwapConfig | None,
    shape: ModelShape,
    budget: Budget,
    calibrated: bool,
    batch: int | None = None,
    tokens: int | None = None,
) -> SwapConfig:
    """The settings for a run.

    A config's table gives the solution for the nearest (batch, context); a budget then lowers what
    does not fit or, when there is no config, uses what there is.

    Parameters
    ----------
    batch, tokens
        Of the first forward pass, where that is what is known. The context is then taken to be half
        as long again, at least 1,024 tokens more.
    """
    context = budget.max_context
    if context is None:
        context = 1 if tokens is None else tokens + max(1024, tokens // 2)
    batch = budget.max_batch or batch or 1
    base = config or default_config(shape)
    if base.table and (budget.is_known or tokens is not None):
        base = base.for_batch_and_context(batch, context)
    base = dataclasses.replace(base, table=())
    if budget.kv_memory_bytes is None:
        return base
    return fit_budget(
        budget.kv_memory_bytes,
        shape,
        context,
        batch,
        base,
        calibrated=calibrated,
        grow=config is None,
    )


def default_config(shape: ModelShape) -> SwapConfig:
    """The defaults, with no more columns than the keys are wide."""
    config = SwapConfig()
    return dataclasses.replace(config, rank=min(shape.width, config.rank))
