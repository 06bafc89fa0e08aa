"""`SwapConfig`'s settings as C++: names, types, defaults and rules, written by ``make schema``.

`settings` is the public header with the flat struct that the engine obeys, `rules` what the C++
readers check files by: version 1's names are the struct's, version 2's paths are a table beside
them. Both headers are made of the fields' own metadata, as the JSON Schema is.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from typing import Any

from kvswap_torch.config import v1
from kvswap_torch.config.constraints import EVEN, FLOORS, ONLY, Only
from kvswap_torch.config.engine import NAMES, WORDS, default_of, item_of
from kvswap_torch.config.json_file import CONFIG_VERSION
from kvswap_torch.config.nested import BLOCKS, OPTIONAL, POLICY, default_score, field_of
from kvswap_torch.config.retention import POLICIES
from kvswap_torch.config.solution import ModelIdentity
from kvswap_torch.config.swap_config import SOLVABLE

NOTICE = "// Written by `make schema` from kvswap_torch/config/; change it there."
_NAME_OF = {path: name for name, path in NAMES.items()}
# What the flat struct can say and no block can: shares of layers and heads belong to a policy of
# their own, without a refresh.
_FLAT_ONLY = (
    *(
        (name, owner, (word,), (), "")
        for name in ("keep_layer_shares", "keep_heads")
        for owner, word in (("rows", "none"), ("keep_interval", "0"))
    ),
    ("audit_every", "rows", (), ("none",), "since nothing is selected"),
    ("missed_mass_max", "rows", (), ("none",), "since nothing is selected"),
)
_DOCS = {
    "grouping": "runs of tokens are selected, or clusters (the block clusters)",
    "keeper": "which tokens are retained (retention.policy); none: no such block",
}


def settings() -> str:
    """The text of csrc/kvswap/settings.h."""
    members = []
    for name, path in NAMES.items():
        item = item_of(name)
        doc = f"{path}: {item.metadata['doc']}" if item else _DOCS[name]
        members += [
            f"  /// {line}"
            for line in textwrap.wrap(doc.replace("`", ""), 90, break_long_words=False)
        ]
        initial = _initial(name)
        members.append(f"  {_type(name)} {name}{f' = {initial}' if initial else ''};")
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
            "/// What the tuner decides and a session obeys: settings of kvswap_torch.SwapConfig.",
            "/// Each begins with its place in a config file; names and words are version 1's.",
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
    visits = [f'  visit("{name}", &Settings::{name}, {_rule(name)});' for name in NAMES]
    known = [f'{{"{name}", {_flag(name not in v1.NOT_SOLVABLE)}}}' for name in v1.PATHS]
    known += [f'{{"{name}", false}}' for name in ("model", "provenance", "table", "version")]
    old = [
        f"  settings.{name} = {_literal(name, value)};"
        for name, value in ((name, _of_first(name, each)) for name, each in v1.DEFAULTS.items())
        if value != default_of(name)
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
            "/// Every field that a file of version 1 may have, in the order of messages.",
            f"inline constexpr ConfigField kConfigFields[] = {{{', '.join(known)}}};",
            "",
            "/// What a file of version 1 means that leaves settings out.",
            "inline Settings settings_of_version_1() {",
            "  Settings settings;",
            *old,
            "  return settings;",
            "}",
            "",
            "/// visit(name, member, rule) for each setting, in the order they are checked in.",
            "template <typename Visit>",
            "void visit_settings(Visit&& visit) {",
            *visits,
            "}",
            "",
            *_paths(),
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


def _paths() -> list[str]:
    """Where version 2 has each setting."""
    rows = []
    for path, name in sorted(_NAME_OF.items(), key=lambda each: _place(each[0])):
        block, _, field = path.partition(".")
        words = WORDS.get(name, {})
        pairs = (
            f"{new}={_flag(old) if isinstance(old, bool) else old}" for new, old in words.items()
        )
        if field and path != POLICY:
            texts = _texts(name, block, field, " ".join(pairs))
            rows.append(f"{texts[:-1]}, {_flag(path in SOLVABLE)}}}")
    policies = [
        _texts(policy, WORDS["keeper"][policy], " ".join(i.name for i in dataclasses.fields(kind)))
        for policy, kind in POLICIES.items()
    ]
    blocks = [f'{{"{name}", {_flag(name in OPTIONAL)}}}' for name in BLOCKS]
    return [
        "/// Where a file of version 2 has a setting, and its words for the struct's: new=old.",
        "struct ConfigPath {",
        "  const char* name;",
        "  const char* block;",
        "  const char* field;",
        "  const char* words;",
        "  bool is_solvable;  // may a solution set it?",
        "};",
        *_array("ConfigPath kConfigPaths", rows),
        "/// A retention policy, the keeper that it is, and its fields.",
        "struct ConfigPolicy {",
        "  const char* policy;",
        "  const char* keeper;",
        "  const char* fields;",
        "};",
        *_array("ConfigPolicy kConfigPolicies", policies),
        "struct ConfigBlock {",
        "  const char* name;",
        "  bool is_optional;  // without it there is none of what it says",
        "};",
        *_array("ConfigBlock kConfigBlocks", blocks),
        "/// `selection.score` of a file that leaves it out, with low-rank keys and otherwise.",
        *(
            f'inline constexpr const char* {name} = "{WORDS["score"][default_score(kind)]}";'
            for name, kind in (("kScoreOfLowRank", "low_rank"), ("kScoreOfOthers", "mean"))
        ),
        "/// `audit.interval` of a block that leaves it out.",
        f"inline constexpr int64_t kAuditInterval = {field_of('audit.interval').default};",
        "",
    ]


def _place(path: str) -> tuple[int, int]:
    block, _, field = path.partition(".")
    kinds = POLICIES.values() if block == "retention" else (BLOCKS[block],)
    names = [item.name for kind in kinds for item in dataclasses.fields(kind)]
    return list(BLOCKS).index(block), names.index(field) if field in names else -1


def _between_two() -> list[str]:
    """What holds between two settings, by the flat names."""
    floors = [
        _texts(_NAME_OF[rule.path], _NAME_OF[rule.floor], rule.why, _keeper(rule.policy))
        for rule in FLOORS
    ]
    only = [
        _texts(name, owner, " ".join(words), " ".join(but), " ".join(values), why)
        for name, owner, words, but, values, why in _all_only()
    ]
    even = [_texts(_NAME_OF[rule.path], _NAME_OF[rule.owner], rule.word, rule.why) for rule in EVEN]
    return [
        "/// `name` is at least `floor`; with a keeper where that is the one.",
        "struct FloorRule {",
        "  const char* name;",
        "  const char* floor;",
        "  const char* why;",
        "  const char* keeper;",
        "};",
        *_array("FloorRule kFloorRules", floors),
        "/// `name` has its default, or where there are values none of them, unless `owner` is one",
        "/// of `words`, or none of `but`; each a list of words.",
        "struct OnlyRule {",
        "  const char* name;",
        "  const char* owner;",
        "  const char* words;",
        "  const char* but;",
        "  const char* values;",
        "  const char* why;",
        "};",
        *_array("OnlyRule kOnlyRules", only),
        "/// `name`, or each number of it, is even where `owner` is `word`.",
        "struct EvenRule {",
        "  const char* name;",
        "  const char* owner;",
        "  const char* word;",
        "  const char* why;",
        "};",
        *_array("EvenRule kEvenRules", even),
    ]


def _array(head: str, rows: list[str]) -> list[str]:
    kind, name = head.split()
    return [f"inline constexpr {kind} {name}[] = {{", *(f"    {row}," for row in rows), "};", ""]


def _texts(*values: str) -> str:
    return "{" + ", ".join(f'"{value}"' for value in values) + "}"


_Row = tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...], str]


def _all_only() -> Iterable[_Row]:
    """Rules of the blocks, and what blocks and policies keep apart by having other fields."""
    for name, path in NAMES.items():
        block, _, field = path.partition(".")
        if block == "retention" and path != POLICY and name not in _IDLE:
            yield name, "keeper", v1.keepers_with(field), (), (), ""
        elif block == "clusters" and field:
            yield name, "grouping", ("clusters",), (), (), ""
    for name, owner, words, but, why in _FLAT_ONLY:
        yield name, owner, words, but, (), why
    for rule in ONLY:
        if rule.path != "audit":
            yield from _flat(rule)


_IDLE = ("keep_layer_least",)  # of a policy without shares of layers it says nothing


def _flat(rule: Only) -> Iterable[_Row]:
    name, owner = _NAME_OF[rule.path], _NAME_OF[rule.owner]
    words, but = (tuple(_word(owner, word) for word in each) for each in (rule.words, rule.but))
    # compresskv is two settings of the flat struct (`_FLAT_ONLY`), not a keeper.
    values = tuple(_word(name, word) for word in rule.values if word != "compresskv")
    yield name, owner, words, but, values, rule.why


def _word(name: str, word: str) -> str:
    return WORDS[name].get(word, word) if name in WORDS else word


def _keeper(policy: str) -> str:
    return "" if policy in ("", "compresskv") else WORDS["keeper"][policy]


def _identity() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(ModelIdentity)


def _identity_type(item: dataclasses.Field[Any]) -> str:
    return "int64_t" if item.type.startswith("int") else "std::string"


def _is_bool(name: str) -> bool:
    return isinstance(default_of(name), bool)


def _type(name: str) -> str:
    item = item_of(name)
    schema = item.metadata["schema"] if item else {}
    default = default_of(name)
    if "anyOf" in schema:
        return "Rank"
    if _is_bool(name):
        return "bool"
    if "enum" in schema or not schema:
        return "std::string" if isinstance(default, str) else "std::optional<std::string>"
    plain = {
        "boolean": "bool",
        "array": "std::vector<int64_t>",
        "integer": "int64_t",
        "number": "double",
        "string": "std::string",
    }
    kind = schema["type"]
    if kind == "array" and schema["items"]["type"] == "number":
        return "std::vector<double>"
    return plain[kind] if isinstance(kind, str) else f"std::optional<{plain[kind[0]]}>"


def _initial(name: str) -> str:
    default = default_of(name)
    return "" if default in (None, ()) else _literal(name, default)


def _literal(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(map(str, value)) + "}"
    if isinstance(value, bool):
        return _flag(value)
    return f'"{value}"' if isinstance(value, str) else str(value)


def _of_first(name: str, value: Any) -> Any:
    """The engine's word for a value of version 1."""
    words = v1.VALUES.get(name)
    return WORDS[name][words[value]] if words else value


def _rule(name: str) -> str:
    item = item_of(name)
    if _is_bool(name):
        return "Boolean{}"
    if name in WORDS:
        return _one_of(tuple(dict.fromkeys(WORDS[name].values())))
    assert item is not None
    schema = item.metadata["schema"]
    if "enum" in schema:
        return _one_of(tuple(choice for choice in schema["enum"] if choice is not None))
    if "anyOf" in schema:
        return f"RankRange{{{schema['anyOf'][0]['maximum']}}}"
    if schema["type"] == ["string", "null"]:
        return "FileName{}"
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
    if name == "audit_every":
        low = 0  # never
    if "number" in schema["type"]:
        return f'RealRange{{{low}, {high}, "{low} to {high}"}}'
    return f"IntRange{{{low}, {high}}}"


def _one_of(values: tuple[Any, ...]) -> str:
    return "OneOf{{" + ", ".join(f'"{value}"' for value in values) + "}}" if values else "OneOf{}"


def _flag(value: bool) -> str:
    return str(value).lower()
