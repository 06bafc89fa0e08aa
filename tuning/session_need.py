"""What a session needs in memory, asked of the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config import SwapConfig

Need = Callable[[SwapConfig], Mapping[str, int]]
"""Settings -> bytes by use, and their sum as "total"."""

ALIGNMENT_BYTES = 4096  # the coarsest of usual disks: elsewhere a record takes no more


@dataclass(frozen=True)
class Demand:
    """What must fit: sequences, tokens of each, and a limit in bytes."""

    context: int
    batch: int
    budget_bytes: int

    def __post_init__(self) -> None:
        if min(self.context, self.batch, self.budget_bytes) < 1:
            raise ValueError(
                "demand: context, batch and budget_bytes must be positive, got "
                f"{self.context}, {self.batch} and {self.budget_bytes}"
            )


def engine_need(model: Any, demand: Demand, alignment_bytes: int = ALIGNMENT_BYTES) -> Need:
    """`Session.memory_need` for one model and demand.

    Parameters
    ----------
    model
        A transformers model that `kvswap_torch.KVSwapCache` supports.
    alignment_bytes
        Of reads on the disk to be used.
    """
    from kvswap_torch.hf import session
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.settings import Budget

    parts = model_parts(model)
    budget = Budget(demand.budget_bytes, demand.context, demand.batch)

    def need(config: SwapConfig) -> Mapping[str, int]:
        options = session.session_options(config, parts, ".", budget, calibrated=True)
        return session.memory_need(options, demand.batch, demand.context, alignment_bytes)

    return need
