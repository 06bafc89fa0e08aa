"""Bytes of a document's full cache, and the settings of a preset that fit into a share of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvswap_torch.config import ModelIdentity, SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.hf.need import CacheNeed
from kvswap_torch.hf.plug_ins import PlugIns
from kvswap_torch.hf.settings import Budget
from kvswap_torch.keep import drops
from kvswap_torch.preset import find
from kvswap_torch.sizing import Request, fit_budget, too_small

DIVIDED = ("selection.top_k_groups", "memory.pages_per_layer")  # by any budget


def selected_tokens(config: SwapConfig) -> int:
    """That the groups of a step hold."""
    return config.selection.top_k_groups * config.selection.group_tokens


@dataclass(frozen=True)
class FittedPreset:
    """Settings in a budget.

    Parameters
    ----------
    smaller
        What of them is a `smaller` step of the preset; empty: they are its own.
    """

    config: SwapConfig
    smaller: Mapping[str, Any] = field(default_factory=dict)


class Bytes:
    """Settings within a budget for one sequence of so many tokens, as the engine itself counts it.

    Parameters
    ----------
    parts
        The model, as `kvswap_torch.hf.families.model_parts` has it.
    context
        Tokens that a cache must hold: the document, and what follows it.
    path
        Folder in which the cache will be; None: that of temporary files.
    tokens
        Of the document, whose full cache shares are of; None: the context.
    """

    def __init__(
        self,
        parts: ModelParts,
        context: int,
        path: str | Path | None = None,
        tokens: int | None = None,
    ):
        self.context = context
        self.full = parts.shape.kv_bytes(tokens or context)
        self._parts = parts
        self._path = str(path or tempfile.gettempdir())

    def fitted(
        self,
        config: SwapConfig,
        budget_bytes: int,
        *,
        keeps_columns: bool = False,
        plug_ins: PlugIns | None = None,
    ) -> SwapConfig:
        """The settings that the cache itself would take under ``kv_memory_bytes``.

        Parameters
        ----------
        keeps_columns
            But with all columns: they belong to what a method is.
        plug_ins
            Of a class of the user's: what it keeps is of the budget.

        Raises
        ------
        BudgetError
            When even the smallest do not fit.
        """
        request = Request(budget_bytes, self.context, 1)
        need = self._need(config, budget_bytes, plug_ins)
        on_cpu = self._parts.device.type == "cpu"  # as hf/settings.py has it
        return need.search(
            lambda: fit_budget(
                request,
                self._parts.shape,
                config,
                lambda settings: need(settings, 1, self.context),
                may_share=on_cpu,
                keeps_columns=keeps_columns,
            )
        )

    def _need(
        self, config: SwapConfig, budget_bytes: int, plug_ins: PlugIns | None = None
    ) -> CacheNeed:
        """As the cache itself will count that is given what is found."""
        return CacheNeed(
            self._parts,
            self._path,
            Budget(budget_bytes, self.context, 1),
            LookAhead(self._parts, budget_bytes, config.ranks_by_sum),
            calibrated=config.summary.projection_file is not None,
            plug_ins=plug_ins,
        )

    @property
    def identity(self) -> ModelIdentity:
        return self._parts.identity

    def preset(self, name: str, settings: dict[str, Any]) -> SwapConfig:
        """A preset's settings for this model, on a disk that reads 4,096 bytes at once."""
        shape = self._parts.preset_shape()
        return SwapConfig.preset(name, settings, shape=shape, model=self.identity)

    def with_fewer_tokens(self, config: SwapConfig, budget_bytes: int) -> SwapConfig:
        """Of a method that drops tokens: as many of those that stay as fit, in 64 steps.

        Raises
        ------
        BudgetError
            When not even one part in 64 does.
        """
        need, settings = self._need(config, budget_bytes), settings_of(config)
        paths = ("retention.tokens", "selection.recent_tokens")
        shared = {path: settings[path] for path in paths if settings.get(path, 0) >= 64}

        def at(step: int) -> SwapConfig:
            return config.with_settings({path: n * step // 64 for path, n in shared.items()})

        for step in range(64, 0, -1):
            if need(at(step), 1, self.context)["total"] <= budget_bytes:
                return at(step)
        least = need(at(1), 1, self.context)
        raise BudgetError(too_small(Request(budget_bytes, self.context, 1), least, at(1)))

    def of_preset(
        self, name: str, changed: dict[str, Any], budget_bytes: int | None
    ) -> FittedPreset:
        """A preset's settings, changed ones among them, in a budget.

        They are those for disks of blocks of 4,096 bytes, so that every disk compares the same.
        Its own where enough of their tokens are selected, half as a rule; else the first of its
        `smaller` ones with which as many are; where there are none, those of all that select most.

        Raises
        ------
        BudgetError
            When even its smallest do not fit.
        ConfigError
            For settings that the preset refuses.
        """
        preset = find(name)
        config = self.preset(name, changed)
        if budget_bytes is None:
            return FittedPreset(config)
        if drops(config):
            return FittedPreset(self.with_fewer_tokens(config, budget_bytes))
        best, refused = None, None
        for step in ({}, *preset.smaller_settings(self._parts.preset_shape(), changed)):
            try:
                tried = self.preset(name, changed | step)
                settings = self.fitted(tried, budget_bytes, keeps_columns=not preset.divides)
            except BudgetError as error:
                refused = error  # the last has the least minimum
                continue
            except ValueError:
                if not step:
                    raise
                continue  # it does not go with what was changed
            taken = settings_of(settings)
            fitted = FittedPreset(settings, {k: taken[k] for k in step if k not in DIVIDED})
            if best is None or selected_tokens(settings) > selected_tokens(best.config):
                best = fitted
            if selected_tokens(settings) >= preset.enough * selected_tokens(config):
                return fitted
        if best is None:
            assert refused is not None
            raise refused
        return best

    def share(self, text: str) -> int:
        """``1/13`` or ``0.1`` of the full cache, in bytes."""
        try:
            part = Fraction(text)
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"memory: must be a share of the full cache such as 1/13, got {text!r}"
            ) from error
        if not 0 < part <= 1:
            raise ValueError(f"memory: must be a share above 0, at most 1, got {text!r}")
        return int(self.full * part)
