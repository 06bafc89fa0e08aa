"""The config as JSON Schema, for editors and other programs: ``make schema`` writes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvswap_torch.config.json_file import CONFIG_VERSION
from kvswap_torch.config.nested import BLOCKS, OPTIONAL
from kvswap_torch.config.retention import POLICIES
from kvswap_torch.config.solution import ModelIdentity
from kvswap_torch.config.swap_config import SOLVABLE, SwapConfig


def schema() -> dict[str, Any]:
    """JSON Schema of the file, made of the fields' own rules."""
    properties: dict[str, Any] = {}
    for name, kind in BLOCKS.items():
        block = _any_policy() if name == "retention" else _block(kind)
        properties[name] = {"anyOf": [{"type": "null"}, block]} if name in OPTIONAL else block
    positive = {"type": "integer", "minimum": 1}
    identity = {
        item.name: positive if item.type.startswith("int") else {"type": "string", "minLength": 1}
        for item in dataclasses.fields(ModelIdentity)
    }
    row = {
        "batch": positive,
        "context": positive,
        "settings": {
            "type": "object",
            "properties": {path: _rule(path) for path in SOLVABLE},
            "additionalProperties": False,
        },
    }
    properties["model"] = {
        "type": ["object", "null"],
        "properties": identity,
        "additionalProperties": False,
    }
    properties["provenance"] = {"type": "object"}
    properties["solutions"] = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": row,
            "required": list(row),
            "additionalProperties": False,
        },
    }
    properties["version"] = {"const": CONFIG_VERSION}
    for name in properties:
        doc = SwapConfig.__dataclass_fields__[name].metadata["doc"]
        properties[name] = properties[name] | {"description": doc}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "kvswap_torch SwapConfig",
        "type": "object",
        "definitions": {f"retention.{name}": _policy(name) for name in POLICIES},
        "properties": properties,
        "required": ["version"],
        "additionalProperties": False,
    }


def _block(kind: type) -> dict[str, Any]:
    properties = {
        item.name: item.metadata["schema"] | {"description": item.metadata["doc"]}
        for item in dataclasses.fields(kind)
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _policy(name: str) -> dict[str, Any]:
    made = _block(POLICIES[name])
    made["properties"] = {"policy": {"const": name}} | made["properties"]
    return made | {"required": ["policy"]}


def _any_policy() -> dict[str, Any]:
    return {"oneOf": [{"$ref": f"#/definitions/retention.{name}"} for name in POLICIES]}


def _rule(path: str) -> dict[str, Any]:
    block, _, field = path.partition(".")
    if not field:
        return {"$ref": f"#/properties/{block}"}
    if path == "retention.policy":
        return {"enum": list(POLICIES)}
    if block == "retention":
        owner = next(n for n, kind in POLICIES.items() if field in kind.__dataclass_fields__)
        return {"$ref": f"#/definitions/retention.{owner}/properties/{field}"}
    inside = "/anyOf/1" if block in OPTIONAL else ""
    return {"$ref": f"#/properties/{block}{inside}/properties/{field}"}
