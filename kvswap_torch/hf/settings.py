"""Which settings a cache runs with, from what its user said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvswap_torch.config import Summary, SwapConfig
from kvswap_torch.errors import ConfigError
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.sizing import ModelShape, Request, fit_budget, spend_budget

Need = Callable[[SwapConfig, int, int], Mapping[str, int]]
"""(settings, batch, context) -> bytes by use."""


@dataclass(frozen=True)
class Budget:
    """What the user promised and asked for; None: not said."""

    kv_memory_bytes: int | None = None
    max_context: int | None = None
    max_batch: int | None = None
    divides: bool = False  # a config that is given is divided like the defaults: `Preset.divides`

    @property
    def is_known(self) -> bool:
        return self.max_context is not None and self.max_batch is not None

    def matters(self, config: SwapConfig | None) -> bool:
        """Whether the settings depend on batch and context at all."""
        is_of_length = config is None or self.divides or bool(config.solutions)
        return self.kv_memory_bytes is not None or is_of_length


def budget_of(
    kv_memory_bytes: int | str | None, max_context: int | None, max_batch: int | None
) -> Budget:
    """What the user said, checked."""
    if kv_memory_bytes is not None:
        kv_memory_bytes = parse_bytes(kv_memory_bytes, "kv_memory_bytes")
    # Positions are of 32 bits in the session.
    for name, value, most in (
        ("max_context", max_context, 2**31 - 1),
        ("max_batch", max_batch, 65536),
    ):
        positive = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most
        if value is not None and not positive:
            raise ConfigError(f"{name}: must be a positive int up to {most} or None, got {value!r}")
    return Budget(kv_memory_bytes, max_context, max_batch)


@dataclass(frozen=True)
class FirstPass:
    """The first forward pass, where that is what is known.

    Parameters
    ----------
    batch, tokens
        Sequences, and tokens of each.
    most
        Tokens that there will be at most, where that is known.
    """

    batch: int
    tokens: int
    most: int | None = None

    @property
    def context(self) -> int:
        """What to be ready for: half as long again, at least 1,024 tokens more."""
        usual = self.tokens + max(1024, self.tokens // 2)
        return usual if self.most is None else max(self.tokens, min(usual, self.most))


def ready_for(budget: Budget, first: FirstPass | None) -> tuple[int, int]:
    """(batch, context) to be ready for, as far as that is known."""
    context = budget.max_context or (first.context if first else 1)
    return budget.max_batch or (first.batch if first else 1), context


def settle(
    config: SwapConfig | None,
    shape: ModelShape,
    budget: Budget,
    need: Need,
    first: FirstPass | None = None,
    on_device: bool = False,
    rank_max: int | tuple[int, ...] | None = None,
    began: FirstPass | None = None,
) -> SwapConfig:
    """The settings for a run.

    A config's table gives the solution for the nearest (batch, context); a budget then lowers what
    does not fit or, when there is no config or one to divide, uses what there is. Before the first
    pass, with batch or context not known, only what no run could do without is checked.

    Parameters
    ----------
    on_device
        Pages are a device's, which has no kernels for int4 rows: they are not chosen unasked, nor
        are pages shared.
    rank_max
        Of projections that are there: `summary.rank` is no higher.
    began
        The first pass, where `first` is a later one: a table's solution is chosen for it, since
        solutions differ in more than memory.
    """
    batch, context = ready_for(budget, first)
    if config is None:
        base = default_config(shape, context)
    else:
        base = at_length(config, context) if budget.divides else config
    # What a tuner has measured is not made slower.
    may_share = not base.solutions and not on_device
    if base.solutions and (budget.is_known or first is not None):
        base = base.for_batch_and_context(*ready_for(budget, began or first))
    base = dataclasses.replace(base, solutions=())
    if rank_max is not None:
        base = base.with_settings({"summary.rank": rank_max})
    if budget.kv_memory_bytes is None:
        return base
    request = Request(budget.kv_memory_bytes, context, batch)

    def uses(settings: SwapConfig) -> Mapping[str, int]:
        return need(settings, batch, context)

    if config is not None and not budget.divides:
        return fit_budget(request, shape, base, uses, may_share=may_share)
    most = rank_max if isinstance(rank_max, int) else None  # of what is spent it is one number
    return spend_budget(request, shape, base, uses, on_device, most)


def default_config(shape: ModelShape, context: int) -> SwapConfig:
    """The defaults, with no more columns than the keys are wide; each layer's true query selects.

    A context of more than 6,144 tokens has twice as many groups: 400 tokens of 7,936 are too few
    even for a choice by the attention itself.

    Groups are scored by the attention they get: a sum of raw products drowns the few heads that
    retrieve. On a real model the divergence from the full cache's next token is 0.05 this way and
    0.47 that way, with the same columns and groups.

    A query predicted from the layer before only prefetches (`prefetch.mode` is ``verify``). Some
    layers cannot be predicted so (those that match what stood a token earlier), and only a
    calibration shows which. On the reference model 10 of 10 answers are right this way, and 0 of 10
    where predictions select (``trust``).
    """
    rank = min(shape.width, Summary().rank)
    return at_length(SwapConfig(summary=Summary(rank=rank)), context)


def at_length(config: SwapConfig, context: int) -> SwapConfig:
    """Settings for a short context, with as many groups and pages as one of that length wants."""
    from kvswap_torch import _C

    factor = _C.length_factor(context)
    return config.with_settings(
        {
            "selection.top_k_groups": config.selection.top_k_groups * factor,
            "memory.pages_per_layer": config.memory.pages_per_layer * factor,
        }
    )
