"""The config as JSON: read with every doubt named, written atomically and byte-stable."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvswap_torch.config import v1
from kvswap_torch.config.nested import OPTIONAL, mapping_of
from kvswap_torch.config.solution import Solution
from kvswap_torch.errors import ConfigError
from kvswap_torch.outside_file import CONFIG_BYTES_MAX, check_characters, read_start

if TYPE_CHECKING:
    from kvswap_torch.config.swap_config import SwapConfig

CONFIG_VERSION = 2  # what is written; version 1 is read too

Config = TypeVar("Config", bound="SwapConfig")


def load(kind: type[Config], path: Path) -> Config:
    """See `SwapConfig.load`; `kind`: what it becomes."""
    try:
        read = read_start(path, CONFIG_BYTES_MAX + 1)
        if len(read) > CONFIG_BYTES_MAX:
            raise ValueError(f"it is longer than {CONFIG_BYTES_MAX} bytes")
        text = read.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path}: must be a readable JSON file: {error}") from error
    try:
        fields = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        check_characters(text, fields)
    except (json.JSONDecodeError, RecursionError, ConfigError, ValueError) as error:
        raise ConfigError(
            f"config {path}: must be valid JSON: {error}; restore the file or tune again"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"config {path}: must be a JSON object, got {type(fields).__name__}")
    version = fields.get("version")
    # Before anything else: a newer file may well have fields that are unknown here.
    if type(version) is not int or version not in (1, CONFIG_VERSION):
        raise ConfigError(
            f"config {path}: version must be 1 or {CONFIG_VERSION}, which this kvswap_torch "
            f"reads, got {version!r}; write it again with the tuner of this kvswap_torch, or use "
            "the kvswap_torch that wrote it"
        )
    known = [item.name for item in dataclasses.fields(kind) if item.metadata]
    known = list(v1.FIELDS) if version == 1 else known
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigError(
            f"config {path}: fields must be among {', '.join(known)}, got {', '.join(unknown)}"
        )
    try:
        made = v1.upgrade(fields) if version == 1 else fields
        return kind(**made, source=path)
    except ConfigError as error:
        told = str(error)
        if version == 1 and told.startswith("solutions:"):
            told = told.replace("solutions:", "table:", 1)
        raise ConfigError(f"config {path}: {told}") from error


def dumps(config: SwapConfig, full: bool = False) -> str:
    """The file's text: one block a line, one solution a line, so that a diff reads well.

    What differs from its default; `full`: every setting.
    """
    fields: dict[str, str] = {"version": _text(config.version)}
    for name, block in mapping_of(config, full).items():
        fields[name] = _text(block)
    if full:
        fields |= {name: "null" for name in OPTIONAL if name not in fields}
    if config.model is not None or full:
        model = dataclasses.asdict(config.model) if config.model is not None else None
        fields["model"] = _text(model and {k: v for k, v in model.items() if v is not None})
    if config.provenance or full:
        shown = json.dumps(config.provenance, indent=2, sort_keys=True, allow_nan=False)
        fields["provenance"] = shown.replace("\n", "\n  ")
    if config.solutions or full:
        rows = ",\n".join(f"    {_text(_solution_json(row))}" for row in config.solutions)
        fields["solutions"] = f"[\n{rows}\n  ]" if rows else "[]"
    lines = [f"  {_text(name)}: {shown}" for name, shown in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(config: SwapConfig, path: Path, full: bool = False) -> None:
    """See `SwapConfig.save`."""
    text = dumps(config, full)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"config {path}: its folder must be writable: {error}") from error
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        # mkstemp's 0600 is for secrets; a config is shared like any file.
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise ConfigError(f"config {path}: could not be written: {error}") from error
        raise


def _solution_json(row: Solution) -> dict[str, Any]:
    return {"batch": row.batch, "context": row.context, "settings": dict(row.settings)}


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise ConfigError(f"a field must be given once, got {', '.join(twice)} again")
    return fields


def _no_constant(name: str) -> Any:
    raise ConfigError(f"numbers must be finite, got {name}")
