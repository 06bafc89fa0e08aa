"""What a preset is: settings that follow from a model's shape, and what there is to say of them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config import flat
from kvswap_torch.config.blocks import Memory
from kvswap_torch.config.engine import renamed
from kvswap_torch.config.nested import OPTIONAL, PATHS
from kvswap_torch.config.solution import ModelIdentity
from kvswap_torch.errors import ConfigError
from kvswap_torch.widths import KeyValueWidths

__all__ = ["TOKENS", "Preset", "Shape", "Value"]

TOKENS = 1024  # attended by methods whose papers give a budget of tokens


@dataclass(frozen=True)
class Shape(KeyValueWidths):
    """What settings of a preset may follow from; the defaults are a Llama's of 8B parameters.

    Attributes
    ----------
    layers
        On disk.
    kv_heads, head_dim, element_bytes
        Of the model's keys.
    alignment_bytes
        What the disk reads at once.
    sides
        2: keys and values; 1: keys that are the values too, as in latent attention.
    value_dim
        Numbers of a KV head's values; 0: as many as of its keys.
    """

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2
    alignment_bytes: int = 4096
    sides: int = 2
    value_dim: int = 0

    @classmethod
    def of(cls, model: ModelIdentity | None, alignment_bytes: int = 4096) -> Shape:
        """Of a model, as far as it is known."""
        if not isinstance(model, ModelIdentity):  # what it is not, SwapConfig says
            return cls()
        known: dict[str, Any] = {
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "element_bytes": {None: None, "float32": 4}.get(model.dtype, 2),
        }
        known = {name: value for name, value in known.items() if value is not None}
        return cls(**known, alignment_bytes=alignment_bytes)

    @property
    def group_of_head(self) -> int:
        """Tokens of the smallest group of one KV head whose record fills half of what is read."""
        return self._group_filling(self.head_width * self.element_bytes)

    @property
    def group_of_bytes(self) -> int:
        """The same of all KV heads, in records of one byte a number; at least four tokens."""
        return max(4, self._group_filling(self.kv_heads * self.head_width))

    @property
    def group_of_half_bytes(self) -> int:
        """The same in records of four bits a number: 8 to 64 tokens, which share a mean."""
        return min(64, max(8, self._group_filling(max(1, self.kv_heads * self.head_width // 2))))

    def _group_filling(self, token_bytes: int) -> int:
        return -(-((self.alignment_bytes + 1) // 2) // token_bytes)


Value = Any | Callable[[Shape], Any]
"""A setting, or what it follows from."""


def _made(settings: Mapping[str, Value], shape: Shape) -> dict[str, Any]:
    return {name: each(shape) if callable(each) else each for name, each in settings.items()}


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
        Of `SwapConfig` by their paths, the others at their defaults; a function is given the
        model's `Shape`.
    calibrate
        What is better calibrated, or must be; empty: nothing.
    differences
        From its paper, a sentence each.
    needs
        Settings of a model that must be given, and some of any model to show it with; empty: none.
    divides
        It divides any budget between columns, groups and pages; of the others columns belong to
        what they are, and a comparison at equal bytes leaves them as long as they fit.
    smaller
        Settings with which it takes less memory, from the most to the least: for comparisons at
        equal bytes in which its own do not fit.
    enough
        The share of its own selected tokens with which a step of `smaller` is taken.
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
    smaller: tuple[Mapping[str, Value], ...] = ()
    enough: float = 0.5

    def smaller_settings(
        self, shape: Shape, changed: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """`smaller`, for a model; larger groups are as many fewer.

        Parameters
        ----------
        changed
            Settings of a user's own, which stay as they are, beside their number of groups.
        """
        changed = changed or {}
        own = _made(self.settings, shape) | dict(changed)
        steps = []
        for step in self.smaller:
            made = {n: v for n, v in _made(step, shape).items() if n not in changed}
            rank = own.get("summary.rank")
            has_less = rank is None or made.get("summary.rank", 0) < rank
            group = made.get("selection.group_tokens")
            if group is not None and "selection.top_k_groups" in own:
                tokens = own["selection.group_tokens"]
                groups = max(1, own["selection.top_k_groups"] * tokens // group)
                pages = own.get("memory.pages_per_layer", 0) * tokens // group
                made["selection.top_k_groups"] = groups
                made["memory.pages_per_layer"] = max(groups, pages)
            if made and has_less:
                steps.append(made)
        return steps

    def shown(self, shape: Shape) -> dict[str, Any]:
        """What it needs to be shown without a model."""
        return _made(self.needs, shape)

    @property
    def _selects_with_the_true_query(self) -> bool:
        """Its heads select by the query itself; by a predicted one it is another method."""
        kind = self.settings.get("summary.kind", "low_rank")
        return kind != "none" and self.settings.get("selection.heads", "joint") == "per_head"

    def config(self, kind: Any, shape: Shape, overrides: Mapping[str, Any]) -> Any:
        """Of `kind`, `SwapConfig`, for a model; see `SwapConfig.preset`."""
        where = f"preset {self.name}"
        old = {name: value for name, value in overrides.items() if flat.is_old(name)}
        said = {**overrides, **dict(renamed(name, value) for name, value in old.items())}
        missing = [path for path in self.needs if path not in said]
        if missing:
            raise ConfigError(
                f"{where}: must be given {' and '.join(missing)}, which belong to a model: "
                f"SwapConfig.preset({self.name!r}, read_heads(FILE)) has them from a heads file "
                "(kvswap_torch.heads_file), which `kvswap calibrate` writes"
            )
        for name in overrides:
            if name not in (*PATHS, *OPTIONAL, "model") and name not in old:
                near = difflib.get_close_matches(str(name), PATHS, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{where}: overrides must be settings, got {name}{hint}")
        self._check_fixed(said)
        made = _made(self.settings, shape)
        if "selection.top_k_groups" in said and "memory.pages_per_layer" not in said:
            pages = made.get("memory.pages_per_layer", Memory().pages_per_layer)
            if isinstance(said["selection.top_k_groups"], int):
                made["memory.pages_per_layer"] = max(pages, said["selection.top_k_groups"])
        new = {n: v for n, v in overrides.items() if n not in old and n != "model"}
        try:
            config = kind(model=overrides.get("model")).with_settings(made | new)
            return dataclasses.replace(config, **old) if old else config
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _check_fixed(self, said: Mapping[str, Any]) -> None:
        fixed = [("summary.kind", "low_rank"), ("retention.policy", None)]
        if "summary.projection" in self.settings:
            fixed.append(("summary.projection", ""))
        trusts = "prefetch.mode" in self.settings or said.get("prefetch.mode") != "trust"
        if not trusts and self._selects_with_the_true_query:
            fixed.append(("prefetch.mode", "verify"))
        for name, usual in fixed:
            own = self.settings.get(name, usual)
            if said.get(name, own) != own:
                raise ConfigError(
                    f"preset {self.name}: {name} must stay {own}, which makes it what it is, got "
                    f"{said[name]!r}; SwapConfig() takes any settings"
                )
        if said.get("retention", self) is None and "retention.policy" in self.settings:
            raise ConfigError(
                f"preset {self.name}: retention must stay, which makes it what it is, got None; "
                "SwapConfig() takes any settings"
            )
