"""A config as the engine's flat settings (`kvswap::Settings`): version 1's names and words.

A setting that version 1 does not have goes by its field's own name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvswap_torch.config.constraints import values_of
from kvswap_torch.config.nested import PATHS, field_of
from kvswap_torch.config.retention import POLICIES
from kvswap_torch.config.v1 import PATHS as FIRST
from kvswap_torch.config.v1 import VALUES

__all__ = ["NAMES", "WORDS", "default_of", "engine_value", "flat_settings", "item_of", "renamed"]

#: The engine's name of each setting -> its path.
NAMES = FIRST | {path.partition(".")[2]: path for path in PATHS if path not in set(FIRST.values())}
# Words of the engine that are not version 1's: of a setting, word of a file -> the engine's.
_LATER: dict[str, dict[str, Any]] = {
    "keeper": {name: name for name in POLICIES if name not in VALUES["keeper"].values()}
    | {"compresskv": "observed"},
    "look_ahead": {word: word for word in ("off", "trust", "verify")},
}
# The struct's own default of `score` is the engine's tests'; readers of files set version 2's.
_ABSENT = {"grouping": "runs", "keeper": "none", "audit_every": 0, "score": "sum"}


def item_of(name: str) -> dataclasses.Field[Any] | None:
    """The field of a setting by the engine's name; None for whether a block is there, and which."""
    return None if name in ("grouping", "keeper") else field_of(NAMES[name])


def _words(name: str) -> dict[str, Any]:
    words = {new: old for old, new in VALUES[name].items()} | _LATER.get(name, {})
    item = item_of(name)
    choices = item.metadata["schema"]["enum"] if item else ()
    return {new: new for new in choices if new is not None} | words


#: Words of a file -> the engine's, of settings where they differ.
WORDS = {name: _words(name) for name in VALUES}


def default_of(name: str) -> Any:
    """What the engine has for a setting that no block says."""
    if name in _ABSENT:
        return _ABSENT[name]
    default: Any = field_of(NAMES[name]).default
    return WORDS[name][default] if name in WORDS else default


def flat_settings(config: Any) -> dict[str, Any]:
    """Every setting of a config by the engine's name, in the engine's words."""
    values = values_of(config)
    made = {}
    for name, path in NAMES.items():
        if path in values:
            made[name] = WORDS[name][values[path]] if name in WORDS else values[path]
        else:
            made[name] = default_of(name)
    return made


def engine_value(config: Any, name: str) -> Any:
    """One setting by the engine's name, in the engine's word."""
    return flat_settings(config)[name]


def renamed(name: str, value: Any) -> tuple[str, Any]:
    """A setting's path, and a file's word for the engine's; of a value that is no word itself."""
    words = VALUES.get(name, {})
    is_word = isinstance(value, str | bool) and value in words
    return NAMES[name], words[value] if is_word else value
