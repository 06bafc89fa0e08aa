"""What a `SwapConfig` holds in addition to settings: the model it is for, the tuner's solutions."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvswap_torch.config.fields import INT_MAX
from kvswap_torch.errors import ConfigError


@dataclass(frozen=True)
class ModelIdentity:
    """What of a model a config depends on. None means: not known, not compared.

    Parameters
    ----------
    model_type
        The family's name, for instance ``qwen3``.
    layers
        Layers that live on disk: the full-attention ones.
    heads, kv_heads, head_dim
        Attention heads, key-value heads, and their width.
    dtype
        Of the keys and values: ``float32``, ``bfloat16`` or ``float16``.
    config_hash
        Hexadecimal digest of the model's own config, set by who calibrated on it.
    """

    model_type: str | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    config_hash: str | None = None

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            kind: type = int if str(item.type).startswith("int") else str
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or value in (0, ""):
                raise ConfigError(f"model.{item.name}: must be a {kind.__name__}, got {value!r}")
            if isinstance(value, int) and not 0 < value <= INT_MAX:
                raise ConfigError(f"model.{item.name}: must be positive, got {value}")

    def differences(self, other: ModelIdentity) -> dict[str, tuple[Any, Any]]:
        """Fields that both know and that differ: name -> (ours, theirs).

        Not the dtype: projections do not depend on it, and what memory is needed is counted anew.
        """
        pairs = {
            item.name: (getattr(self, item.name), getattr(other, item.name))
            for item in dataclasses.fields(self)
            if item.name != "dtype"
        }
        return {
            name: (ours, theirs)
            for name, (ours, theirs) in pairs.items()
            if ours is not None and theirs is not None and ours != theirs
        }


@dataclass(frozen=True)
class Solution:
    """The settings found best for one batch size and context length.

    Parameters
    ----------
    batch, context
        The pair; `context` in tokens.
    settings
        Paths (``selection.top_k_groups``) and values of the settings that differ from the config's
        own. Given as a mapping, kept as sorted pairs.
    """

    batch: int
    context: int
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "context"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or not 0 < value <= INT_MAX:
                raise ConfigError(f"solutions: {name} must be a positive int, got {value!r}")
        given = dict(self.settings)
        for name, value in given.items():
            given[name] = tuple(value) if isinstance(value, list) else value
        object.__setattr__(self, "settings", tuple(sorted(given.items())))

    def distance(self, batch: int, context: int) -> float:
        """How far a request is from this pair, in doublings of either."""
        return abs(math.log2(self.batch / batch)) + abs(math.log2(self.context / context))


def identity_from(fields: Mapping[str, Any]) -> ModelIdentity:
    """The model identity that `fields` describe; refuses unknown names."""
    known = [item.name for item in dataclasses.fields(ModelIdentity)]
    unknown = sorted(str(name) for name in set(fields) - set(known))
    if unknown:
        raise ConfigError(
            f"model: fields must be among {', '.join(known)}, got {', '.join(unknown)}"
        )
    return ModelIdentity(**fields)


def solution_from(row: Any) -> Solution:
    """A solution from JSON, or as it is."""
    if isinstance(row, Solution):
        return row
    if not isinstance(row, Mapping) or set(row) != {"batch", "context", "settings"}:
        raise ConfigError(f"solutions: a row must have batch, context and settings, got {row!r}")
    if not isinstance(row["settings"], Mapping):
        raise ConfigError(f"solutions: settings must be an object, got {row['settings']!r}")
    return Solution(row["batch"], row["context"], tuple(row["settings"].items()))


def checked_json(provenance: Any) -> dict[str, Any]:
    """A copy of `provenance` as JSON would give it back; refuses what JSON cannot hold."""
    if not isinstance(provenance, Mapping):
        raise ConfigError(f"provenance: must be a mapping, got {provenance!r}")
    try:
        return json.loads(json.dumps(dict(provenance), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"provenance: must be what JSON can hold: {error}") from error


def adopt_plain_values(config: Any) -> None:
    """A config's lists and mappings, as JSON gives them, become what its fields promise."""
    if isinstance(config.model, Mapping):
        object.__setattr__(config, "model", identity_from(config.model))
    elif config.model is not None and not isinstance(config.model, ModelIdentity):
        raise ConfigError(f"model: must be a ModelIdentity or None, got {config.model!r}")
    object.__setattr__(config, "provenance", checked_json(config.provenance))
    if isinstance(config.solutions, str) or not isinstance(config.solutions, tuple | list):
        raise ConfigError(f"solutions: must be a list of solutions, got {config.solutions!r}")
    object.__setattr__(config, "solutions", tuple(map(solution_from, config.solutions)))


def nearest(solutions: Sequence[Solution], batch: int, context: int) -> Solution:
    """Of solutions that are not empty; see `SwapConfig.for_batch_and_context`."""
    return min(solutions, key=lambda row: (row.distance(batch, context), -row.context, -row.batch))


def check_solutions(
    solutions: Sequence[Solution], solvable: Sequence[str], with_row: Callable[[Solution], Any]
) -> None:
    """Raises `ConfigError` for two rows of one pair, or a row whose settings are wrong.

    Parameters
    ----------
    solvable
        What a row may set.
    with_row
        Makes the config of a row, which checks it.
    """
    seen: set[tuple[int, int]] = set()
    for row in solutions:
        if (row.batch, row.context) in seen:
            raise ConfigError(
                f"solutions: one solution per pair, got two for batch {row.batch}, context "
                f"{row.context}"
            )
        seen.add((row.batch, row.context))
        foreign = sorted(set(dict(row.settings)) - set(solvable))
        if foreign:
            raise ConfigError(
                "solutions: a solution must set only settings by their paths (config.schema.json "
                f"lists them), got {', '.join(foreign)}"
            )
        try:
            with_row(row)
        except ConfigError as error:
            raise ConfigError(
                f"solutions: batch {row.batch}, context {row.context}: {error}"
            ) from error
