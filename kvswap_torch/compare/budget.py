"""Bytes of a document's full cache, and the settings of a preset that fit into a share of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kvswap_torch.config import ModelIdentity, SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.keep import drops
from kvswap_torch.preset import Preset, Shape, find
from kvswap_torch.sizing import ModelShape, Request, fit_budget, too_small
from kvswap_torch.tuning.settings import Demand, Need, engine_need


def selected_tokens(config: SwapConfig) -> int:
    """That the groups of a step hold."""
    return config.selection.top_k_groups * config.selection.group_tokens


class Bytes:
    """Settings within a budget for one sequence of so many tokens, as the engine itself counts it.

    Parameters
    ----------
    model
        A transformers model that `kvswap_torch.KVSwapCache` supports.
    context
        Tokens of the document.
    """

    def __init__(self, model: Any, shape: ModelShape, context: int):
        self.shape, self.context = shape, context
        self.full = shape.kv_bytes(context)
        self._model = model

    def _under(self, budget_bytes: int) -> Need:
        return engine_need(self._model, Demand(self.context, 1, budget_bytes))

    def fitted(
        self, config: SwapConfig, budget_bytes: int, *, keeps_columns: bool = False
    ) -> SwapConfig:
        """The settings that the cache itself would take under ``kv_memory_bytes``.

        Parameters
        ----------
        keeps_columns
            But with all columns: they belong to what a method is.

        Raises
        ------
        BudgetError
            When even the smallest do not fit.
        """
        request, need = Request(budget_bytes, self.context, 1), self._under(budget_bytes)
        on_cpu = model_parts(self._model).device.type == "cpu"  # as hf/settings.py has it
        return fit_budget(
            request, self.shape, config, need, may_share=on_cpu, keeps_columns=keeps_columns
        )

    @property
    def identity(self) -> ModelIdentity:
        return model_parts(self._model).identity

    def with_fewer_tokens(self, config: SwapConfig, budget_bytes: int) -> SwapConfig:
        """Of a method that drops tokens: as many of those that stay as fit, in 64 steps.

        Raises
        ------
        BudgetError
            When not even one part in 64 does.
        """
        need = self._under(budget_bytes)
        settings = settings_of(config)
        paths = ("retention.tokens", "selection.recent_tokens")
        shared = {path: settings[path] for path in paths if settings.get(path, 0) >= 64}

        def at(step: int) -> SwapConfig:
            return config.with_settings({path: n * step // 64 for path, n in shared.items()})

        for step in range(64, 0, -1):
            if need(at(step))["total"] <= budget_bytes:
                return at(step)
        raise BudgetError(too_small(Request(budget_bytes, self.context, 1), need(at(1)), at(1)))

    def of_preset(self, name: str, changed: dict[str, Any], budget_bytes: int | None) -> SwapConfig:
        """A preset's settings, changed ones among them, in a budget.

        Where its own do not fit, its `smaller` ones: the first with which at least half of the
        tokens of its own are selected, else those that select most.

        Raises
        ------
        BudgetError
            When even its smallest do not fit.
        ConfigError
            For settings that the preset refuses.
        """
        preset = find(name)
        config = SwapConfig.preset(name, changed, model=self.identity)
        if budget_bytes is None:
            return config
        if drops(config):
            return self.with_fewer_tokens(config, budget_bytes)
        try:
            return self.fitted(config, budget_bytes, keeps_columns=not preset.divides)
        except BudgetError:
            found = self._smaller(preset, changed, budget_bytes)
            if found is None:
                raise
            return found

    def _smaller(
        self, preset: Preset, changed: dict[str, Any], budget_bytes: int
    ) -> SwapConfig | None:
        best = None
        for settings in preset.smaller_settings(Shape.of(self.identity)):
            own = SwapConfig.preset(preset.name, settings | changed, model=self.identity)
            try:
                config = self.fitted(own, budget_bytes, keeps_columns=True)
            except BudgetError:
                continue
            if 2 * selected_tokens(config) >= selected_tokens(own):
                return config
            if best is None or selected_tokens(config) > selected_tokens(best):
                best = config
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
