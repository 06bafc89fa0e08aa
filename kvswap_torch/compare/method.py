"""Methods by name, and the caches that they open in a budget."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvswap_torch.compare.budget import Bytes, FittedPreset
from kvswap_torch.config import PATHS, SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.heads_file import read_heads
from kvswap_torch.hf.plug_ins import PlugIns
from kvswap_torch.keep import drops, with_keep
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.plug_ins import GroupScores, TokenScores
from kvswap_torch.preset import find, presets

if TYPE_CHECKING:
    from kvswap_torch import KVSwapCache

FULL = "full"
ALL = "all"
HEADS = "heads"  # a setting of presets that need a heads file: where it is
KINDS = ("tokens", "bytes")


@dataclass(frozen=True)
class Budget:
    """``tokens:1024``: attended in a step. ``bytes:1/13`` or ``bytes:64MiB``: memory."""

    text: str
    kind: str
    value: int | Fraction

    @classmethod
    def parse(cls, text: str) -> Budget:
        """
        Raises
        ------
        ConfigError
            It is neither.
        """
        kind, _, value = text.partition(":")
        wrong = ConfigError(
            "--budget: must be tokens:N, bytes:SHARE of the full cache or bytes:SIZE, such as "
            f"tokens:1024, bytes:1/13 or bytes:64MiB, got {text!r}"
        )
        if kind not in KINDS or not value:
            raise wrong
        if kind == "tokens":
            if not value.isdecimal() or int(value) < 1:
                raise wrong
            return cls(text, kind, int(value))
        if "/" in value or "." in value or value == "1":
            try:
                share = Fraction(value)
            except (ValueError, ZeroDivisionError):
                share = None
            if share is not None:
                if not 0 < share <= 1:
                    raise wrong
                return cls(text, kind, share)
        try:
            return cls(text, kind, parse_bytes(value, "--budget"))
        except ValueError as error:
            raise wrong from error

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> list[Budget]:
        """Each once; a text may have several, with commas between.

        Raises
        ------
        ConfigError
            One is none.
        """
        names = (name for text in texts for name in text.replace(" ", "").split(","))
        return [cls.parse(name) for name in dict.fromkeys(names)]

    def in_bytes(self, full: int) -> int:
        """Of a full cache of so many bytes."""
        return int(self.value * full) if isinstance(self.value, Fraction) else self.value


@dataclass(frozen=True)
class Method:
    """A preset or a plug-in, with settings of its own.

    Attributes
    ----------
    name
        ``quest``, ``quest:selection.group_tokens=32``, or a plug-in ``module.Class``.
    """

    name: str
    preset: str | None = None
    plug_in: type[GroupScores] | type[TokenScores] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str) -> Method:
        """
        Raises
        ------
        ConfigError
            There is no such preset, plug-in or setting.
        """
        first, *parts = name.split(":")
        settings: dict[str, Any] = {}
        for part in parts:
            key, mark, value = part.partition("=")
            if not mark or key not in (*PATHS, HEADS):
                raise ConfigError(
                    f"--methods: settings must be PATH=VALUE with a path of SwapConfig, or "
                    f"{HEADS}=FILE, got {part!r} in {name!r}"
                )
            if key == HEADS:
                settings |= read_heads(Path(value))
            else:
                settings[key] = _value(value)
        if "." in first:
            return cls(name, None, _plug_in(first), settings)
        find(first)
        return cls(name, first, None, settings)

    @classmethod
    def parse_all(cls, text: str) -> list[Method]:
        """Names with commas between, each once; ``all``: every preset that needs no file.

        Raises
        ------
        ConfigError
            There is no name, or `parse` refuses one.
        """
        every = [preset.name for preset in presets() if not preset.needs]
        names = [name for name in text.replace(" ", "").split(",") if name]
        if not names:
            raise ConfigError("--methods: must have a name at least, got none; see kvswap presets")
        known = dict.fromkeys(each for name in names for each in (every if name == ALL else [name]))
        return [cls.parse(name) for name in known]

    def fitted(self, budget: Budget, size: Bytes) -> FittedPreset | None:
        """Its settings in a budget; None: the cache itself divides the bytes.

        Parameters
        ----------
        size
            Of the document with what follows it.

        Raises
        ------
        BudgetError, ConfigError
            The budget is too small, or the method has none of this kind.
        """
        if budget.kind == "tokens":
            return FittedPreset(with_tokens(self._own(size), int(budget.value)))
        most = budget.in_bytes(size.full)
        if self.preset is None:
            own = self._own(size)
            if drops(own):
                return FittedPreset(size.with_fewer_tokens(own, most))
            fitted = size.fitted(own, most, keeps_columns=True, plug_ins=self._plug_ins())
            return FittedPreset(fitted)
        if find(self.preset).divides and not self.settings:
            return None
        return size.of_preset(self.preset, self.settings, most)

    def _own(self, size: Bytes) -> SwapConfig:
        if self.preset is not None:
            return size.preset(self.preset, self.settings)
        base = SwapConfig(model=size.identity)
        if self.plug_in is not None and issubclass(self.plug_in, TokenScores):
            user = {"summary.kind": "none", "retention.policy": "user", "retention.tokens": 1024}
            return base.with_settings(user | self.settings)
        return base.with_settings({"summary.kind": "user"} | self.settings)

    def opened(
        self,
        model: Any,
        path: Path,
        fitted: FittedPreset | None,
        context: int,
        budget_bytes: int | None,
    ) -> KVSwapCache:
        """Its cache for one sequence of `context` tokens; the caller closes it.

        Parameters
        ----------
        fitted
            See `fitted`.
        budget_bytes
            None: there is no limit.
        """
        from kvswap_torch import KVSwapCache

        plug_ins = self._plug_ins()
        return KVSwapCache(
            model,
            path=path,
            config=None if fitted is None else fitted.config,
            preset=self.preset if fitted is None else None,
            kv_memory_bytes=budget_bytes,
            max_context=context,
            max_batch=1,
            group_scores=plug_ins.group_scores,
            token_scores=plug_ins.token_scores,
        )

    def _plug_ins(self) -> PlugIns:
        """With an object of its class."""
        made = None if self.plug_in is None else self.plug_in()
        return PlugIns(
            made if isinstance(made, GroupScores) else None,
            made if isinstance(made, TokenScores) else None,
        )


def with_tokens(config: SwapConfig, tokens: int) -> SwapConfig:
    """The settings with which a step attends at most so many tokens, in its selecting layers.

    Sinks, newest, retained and selected tokens count. The number of retained ones is scaled, of
    which a method's share of its own total is kept; the rest is groups.

    Raises
    ------
    ConfigError
        A method that attends everything, or fewer tokens than it always has.
    """
    if drops(config):
        return with_keep(config, tokens, None)
    if config.summary.kind == "none":
        raise ConfigError("--budget tokens: must be of a method that selects, got one that attends "
                          "everything")  # fmt: skip
    settings = settings_of(config)
    group, groups = config.selection.group_tokens, config.selection.top_k_groups
    always = config.selection.sink_tokens + config.selection.recent_tokens
    retained = settings.get("retention.tokens", 0)
    changed: dict[str, Any] = {}
    if retained:
        retained = max(1, tokens * retained // (always + retained + group * groups))
        changed["retention.tokens"] = retained
    fit = (tokens - always - retained) // group
    if fit < 1:
        raise BudgetError(
            f"--budget tokens:{tokens}: must be at least {always + retained + group}: {always} "
            f"sinks and newest tokens, {retained} retained ones and a group of {group}"
        )
    pages = max(-(-config.memory.pages_per_layer * fit // groups), fit,
                config.selection.max_step_tokens)  # fmt: skip
    return config.with_settings(
        changed | {"selection.top_k_groups": fit, "memory.pages_per_layer": pages}
    )


def _plug_in(name: str) -> type[GroupScores] | type[TokenScores]:
    module, _, attribute = name.rpartition(".")
    sys.path.insert(0, "")  # a module of the folder that the command is typed in
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--methods: a name with a dot must be module.Class of a plug-in, got {name!r}: {error}"
        ) from error
    finally:
        sys.path.remove("")
    if not isinstance(found, type) or not issubclass(found, GroupScores | TokenScores):
        raise ConfigError(
            f"--methods: {name} must be a class made from kvswap_torch.plug_ins.GroupScores or "
            f"TokenScores, got {found!r}"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(
            f"--methods: {name} must be made without arguments, has {inspect.signature(found)}; "
            "name a class of your own that gives them"
        ) from error
    return found


def _value(text: str) -> Any:
    """A setting as JSON would have it, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text
