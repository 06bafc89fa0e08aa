"""What a preset is: settings that follow from a model's shape, and what there is to say of them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config_parts import ModelIdentity
from kvswap_torch.errors import ConfigError

__all__ = ["TOKENS", "Preset", "Shape"]

TOKENS = 1024  # attended by methods whose papers give a budget of tokens


@dataclass(frozen=True)
class Shape:
    """What settings of a preset may follow from; the defaults are a Llama's of 8B parameters.

    Attributes
    ----------
    layers
        On disk.
    kv_heads, head_dim, element_bytes
        Of the model's keys.
    alignment_bytes
        What the disk reads at once.
    """

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2
    alignment_bytes: int = 4096

    @classmethod
    def of(cls, model: ModelIdentity | None, alignment_bytes: int = 4096) -> Shape:
        """Of a model, as far as it is known."""
        if not isinstance(model, ModelIdentity):  # what it is not, SwapConfig says
            return cls()
        known = {
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "element_bytes": {None: None, "float32": 4}.get(model.dtype, 2),
        }
        known = {name: value for name, value in known.items() if value is not None}
        return cls(**known, alignment_bytes=alignment_bytes)

    @property
    def width(self) -> int:
        """Numbers of one token's keys."""
        return self.kv_heads * self.head_dim

    @property
    def group_of_head(self) -> int:
        """Tokens of the smallest group of one KV head whose record fills half of what is read."""
        return self._group_filling(2 * self.head_dim * self.element_bytes)

    @property
    def group_of_bytes(self) -> int:
        """The same of all KV heads, in records of one byte a number; at least four tokens."""
        return max(4, self._group_filling(2 * self.width))

    def _group_filling(self, token_bytes: int) -> int:
        return -(-((self.alignment_bytes + 1) // 2) // token_bytes)


Value = Any | Callable[[Shape], Any]


@dataclass(frozen=True)
class Preset:
    """One system.

    Attributes
    ----------
    name, paper
        What it is called, and where it was published.
    take, leave
        When to take it, and when not: a sentence each.
    settings
        Of `SwapConfig`, the others at their defaults; a function is given the model's `Shape`.
    calibrate
        What is better calibrated, or must be; empty: nothing.
    differences
        From its paper, a sentence each.
    needs
        Settings of a model that must be given, and some of any model to show it with; empty: none.
    divides
        It divides any budget between columns, groups and pages; of the others columns belong to
        what they are, and a comparison at equal bytes leaves them.
    """

    name: str
    paper: str
    take: str
    leave: str
    settings: Mapping[str, Value]
    calibrate: str = ""
    differences: tuple[str, ...] = ()
    needs: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    divides: bool = False

    def shown(self, shape: Shape) -> dict[str, Any]:
        """What it needs to be shown without a model."""
        return {name: each(shape) if callable(each) else each for name, each in self.needs.items()}

    @property
    def _asks_with_the_true_query(self) -> bool:
        """Its heads choose by the query itself; by a predicted one it is another method."""
        rows = self.settings.get("rows", "low_rank")
        return rows != "none" and self.settings.get("heads", "all") == "each"

    def settings_for(
        self, shape: Shape, known: Sequence[str], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Of `SwapConfig`, whose settings are `known`, for a model; see `SwapConfig.preset`."""
        missing = [name for name in self.needs if name not in overrides]
        if missing:
            raise ConfigError(
                f"preset {self.name}: must be given {' and '.join(missing)}, which belong to a "
                f"model: SwapConfig.preset({self.name!r}, **read_heads(FILE)) has them from a "
                "heads file (kvswap_torch.heads_file), which `kvswap calibrate` writes"
            )
        where = f"preset {self.name}"
        for name in overrides:
            if name not in (*known, "model"):
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{where}: overrides must be settings, got {name}{hint}")
        fixed = [("rows", "low_rank"), ("keeper", "none")]
        if "projection_kind" in self.settings:
            fixed.append(("projection_kind", ""))
        if not self.settings.get("look_ahead", False) and self._asks_with_the_true_query:
            fixed.append(("look_ahead", False))
        for name, usual in fixed:
            own = self.settings.get(name, usual)
            if overrides.get(name, own) != own:
                raise ConfigError(
                    f"{where}: {name} must stay {own}, which makes it what it is, got "
                    f"{overrides[name]!r}; SwapConfig() takes any settings"
                )
        made = {
            name: value(shape) if callable(value) else value
            for name, value in self.settings.items()
        }
        if "groups_max" in overrides and "pages_max" not in overrides:
            made["pages_max"] = max(made.get("pages_max", 200), overrides["groups_max"])
        return made | dict(overrides)
