"""The config as JSON Schema, for editors and other programs: ``make schema`` writes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvswap_torch.config import CONFIG_VERSION, SOLVABLE, SwapConfig
from kvswap_torch.config_parts import ModelIdentity


def schema() -> dict[str, Any]:
    """JSON Schema of the file, made of the fields' own rules."""
    properties: dict[str, Any] = {}
    for item in dataclasses.fields(SwapConfig):
        if "schema" in item.metadata:
            properties[item.name] = item.metadata["schema"] | {"description": item.metadata["doc"]}
    positive = {"type": "integer", "minimum": 1}
    identity = {
        item.name: positive if item.type.startswith("int") else {"type": "string", "minLength": 1}
        for item in dataclasses.fields(ModelIdentity)
    }
    settings = {name: {"$ref": f"#/properties/{name}"} for name in SOLVABLE}
    row = {
        "batch": positive,
        "context": positive,
        "settings": {"type": "object", "properties": settings, "additionalProperties": False},
    }
    properties["projection_file"] = {"type": ["string", "null"], "minLength": 1}
    properties["model"] = {
        "type": ["object", "null"],
        "properties": identity,
        "additionalProperties": False,
    }
    properties["provenance"] = {"type": "object"}
    properties["table"] = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": row,
            "required": list(row),
            "additionalProperties": False,
        },
    }
    properties["version"] = {"const": CONFIG_VERSION}
    for name in ("projection_file", "model", "provenance", "table", "version"):
        doc = SwapConfig.__dataclass_fields__[name].metadata["doc"]
        properties[name] = properties[name] | {"description": doc}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "kvswap_torch SwapConfig",
        "type": "object",
        "properties": properties,
        "required": ["version"],
        "additionalProperties": False,
    }
