"""`SwapConfig`'s fields as C++: names, types, defaults and rules, written by ``make schema``.

`settings` is the public header with the struct, `rules` what the C++ loader checks a file by. Both
are made of the fields' own metadata, as the JSON Schema is, so that no rule is written twice.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from kvswap_torch.config import CONFIG_VERSION, SETTINGS, SOLVABLE, SwapConfig
from kvswap_torch.config_between import EVEN, FLOORS, IDLE, OWNED
from kvswap_torch.config_parts import ModelIdentity

NOTICE = "// Written by `make schema` from kvswap_torch/config.py; change it there."


def settings() -> str:
    """The text of csrc/kvswap/settings.h."""
    members = []
    for item in _fields():
        doc = textwrap.wrap(item.metadata["doc"].replace("`", ""), 90, break_long_words=False)
        members += [f"  /// {line}" for line in doc]
        kind, initial = _type(item), _initial(item)
        members.append(f"  {kind} {item.name}{f' = {initial}' if initial else ''};")
    return "\n".join(
        [
            "#pragma once",
            "",
            NOTICE,
            "",
            "#include <cstdint>",
            "#include <optional>",
            "#include <string>",
            "#include <variant>",
            "#include <vector>",
            "",
            "namespace kvswap {",
            "",
            "/// One rank for all layers on disk, or one for each.",
            "using Rank = std::variant<int64_t, std::vector<int64_t>>;",
            "",
            "/// What the tuner decides and a session obeys: fields of kvswap_torch.SwapConfig.",
            "struct Settings {",
            *members,
            "",
            "  bool operator==(const Settings&) const = default;",
            "};",
            "",
            "/// What of a model a config depends on; nothing: not known, not compared.",
            "struct ModelIdentity {",
            *(f"  std::optional<{_identity_type(i)}> {i.name};" for i in _identity()),
            "",
            "  bool operator==(const ModelIdentity&) const = default;",
            "};",
            "",
            "}  // namespace kvswap",
            "",
        ]
    )


def rules() -> str:
    """The text of csrc/kvswap/settings_rules.h."""
    visits = [
        f'  visit("{item.name}", &Settings::{item.name}, {_rule(item)});' for item in _fields()
    ]
    known = [
        f'{{"{item.name}", {str(item.name in SOLVABLE).lower()}}}'
        for item in dataclasses.fields(SwapConfig)
        if item.metadata
    ]
    identity = [f'  visit("{i.name}", &ModelIdentity::{i.name});' for i in _identity()]
    return "\n".join(
        [
            "#pragma once",
            "",
            NOTICE,
            "",
            '#include "kvswap/rules.h"',
            '#include "kvswap/settings.h"',
            "",
            "namespace kvswap {",
            "",
            f"inline constexpr int64_t kConfigVersion = {CONFIG_VERSION};",
            "",
            "struct ConfigField {",
            "  const char* name;",
            "  bool is_solvable;  // may a row of the table set it?",
            "};",
            "/// Every field that a config file may have, in the order that messages name them.",
            f"inline constexpr ConfigField kConfigFields[] = {{{', '.join(known)}}};",
            "",
            "/// visit(name, member, rule) for each setting, in the order they are checked in.",
            "template <typename Visit>",
            "void visit_settings(Visit&& visit) {",
            *visits,
            "}",
            "",
            *_between_two(),
            "template <typename Visit>",
            "void visit_identity(Visit&& visit) {",
            *identity,
            "}",
            "",
            "}  // namespace kvswap",
            "",
        ]
    )


def _between_two() -> list[str]:
    """What holds between two settings."""
    floors = [
        f'  visit("{floor.name}", &Settings::{floor.name}, "{floor.floor}", '
        f'&Settings::{floor.floor}, "{floor.why}", "{floor.keeper}");'
        for floor in FLOORS
    ]
    owned = [
        f'  visit("{each.name}", &Settings::{each.name}, "{each.owner}", '
        f'&Settings::{each.owner}, "{each.word}", {_values(each.values)});'
        for each in OWNED
    ]
    idle = [
        f'  visit("{each.name}", &Settings::{each.name}, "{each.owner}", '
        f'&Settings::{each.owner}, "{each.word}", "{each.why}", {_values(each.values)});'
        for each in IDLE
    ]
    even = [
        f'  visit("{each.name}", &Settings::{each.name}, "{each.owner}", '
        f'&Settings::{each.owner}, "{each.word}", "{each.why}");'
        for each in EVEN
    ]
    return [
        "/// visit(name, member, floor's name, floor's member, why, keeper): what holds between",
        "/// two, with that keeper, or where it is empty with any.",
        "template <typename Visit>",
        "void visit_floors(Visit&& visit) {",
        *floors,
        "}",
        "",
        "/// visit(name, member, owner's name, its member, word, values): the setting has its",
        "/// default, or where there are values none of them, unless the owner is that word.",
        "template <typename Visit>",
        "void visit_owned(Visit&& visit) {",
        *owned,
        "}",
        "",
        "/// visit(name, member, owner's name, its member, word, why, values): the setting has its",
        "/// default, or where there are values none of them, where the owner is that word.",
        "template <typename Visit>",
        "void visit_idle(Visit&& visit) {",
        *idle,
        "}",
        "",
        "/// visit(name, member, owner's name, its member, word, why): the setting, or each number",
        "/// of it, is even where the owner is that word.",
        "template <typename Visit>",
        "void visit_even(Visit&& visit) {",
        *even,
        "}",
        "",
    ]


def _fields() -> list[dataclasses.Field[Any]]:
    return [SwapConfig.__dataclass_fields__[name] for name in SETTINGS]


def _identity() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(ModelIdentity)


def _identity_type(item: dataclasses.Field[Any]) -> str:
    return "int64_t" if item.type.startswith("int") else "std::string"


def _type(item: dataclasses.Field[Any]) -> str:
    schema = item.metadata.get("schema", {})
    if "anyOf" in schema:
        return "Rank"
    plain = {
        "boolean": "bool",
        "array": "std::vector<int64_t>",
        "integer": "int64_t",
        "number": "double",
    }
    kind = schema.get("type")
    if kind == "array" and schema["items"]["type"] == "number":
        return "std::vector<double>"
    if isinstance(kind, str):
        return plain[kind]
    optional = {"integer": "std::optional<int64_t>", "number": "std::optional<double>"}
    if kind is not None:
        return optional[kind[0]]
    return "std::string" if isinstance(item.default, str) else "std::optional<std::string>"


def _initial(item: dataclasses.Field[Any]) -> str:
    if item.default in (None, ()):
        return ""
    if isinstance(item.default, tuple):
        return "{" + ", ".join(map(str, item.default)) + "}"
    if isinstance(item.default, bool):
        return str(item.default).lower()
    return f'"{item.default}"' if isinstance(item.default, str) else str(item.default)


def _rule(item: dataclasses.Field[Any]) -> str:
    schema = item.metadata.get("schema")
    if schema is None:
        return "FileName{}"
    if "enum" in schema:
        return f"OneOf{{{_names(choice for choice in schema['enum'] if choice is not None)}}}"
    if "anyOf" in schema:
        return f"RankRange{{{schema['anyOf'][0]['maximum']}}}"
    if schema["type"] == "boolean":
        return "Boolean{}"
    if schema["type"] == "array" and "minItems" in schema:
        low, high = schema["items"]["minimum"], schema["items"]["maximum"]
        return f'RealsRange{{{schema["minItems"]}, {low}, {high}, "{low} to {high}"}}'
    if schema["type"] == "array" and schema["items"]["type"] == "number":
        low, high = schema["items"]["minimum"], schema["items"]["maximum"]
        return f'Reals{{{low}, {high}, "{low} to {high}"}}'
    if schema["type"] == "array":
        return f'Numbers{{"{schema["title"]}"}}'
    if "exclusiveMinimum" in schema:
        return "Share{}"
    low, high = schema["minimum"], schema["maximum"]
    if "number" in schema["type"]:
        return f'RealRange{{{low}, {high}, "{low} to {high}"}}'
    return f"IntRange{{{low}, {high}}}"


def _values(values: tuple[str, ...]) -> str:
    return f"OneOf{{{_names(values)}}}" if values else "OneOf{}"


def _names(names: Any) -> str:
    return "{" + ", ".join(f'"{name}"' for name in names) + "}"
