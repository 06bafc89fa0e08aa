"""Projections in a safetensors file: what calibration writes and the cache reads.

Tensors ``layers.{i}.key`` and ``layers.{i}.query``, ``[kv_heads * head_dim, columns]`` fp32, for
every layer i on disk, counted from 0 over those; the first r columns are the projection of rank r.
Metadata: ``kvswap_projection`` (the format's version), ``kind``, ``model``, the identity of the
model as JSON, and ``heads`` where it is ``each``: then the rows of every KV head are a projection
of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvswap_torch.config.engine import renamed
from kvswap_torch.config.solution import ModelIdentity, identity_from
from kvswap_torch.errors import ConfigError
from kvswap_torch.outside_file import check_safetensors, strict_json
from kvswap_torch.projection import Pair

FORMAT_VERSION = "1"


def save_projections(
    path: str | Path,
    pairs: Sequence[Pair],
    *,
    kind: str,
    model: ModelIdentity | None = None,
    heads: str = "all",
) -> None:
    """Writes one pair a layer; equal pairs give equal bytes.

    Parameters
    ----------
    kind
        As `SwapConfig.projection_kind`.
    heads
        As in `SwapConfig`: ``each`` where every KV head has a projection of its own.
    """
    tensors = {}
    for layer, (key, query) in enumerate(pairs):
        # safetensors refuses two names for one memory, which svd_keys has: copies.
        tensors[f"layers.{layer}.key"] = key.float().clone().contiguous()
        tensors[f"layers.{layer}.query"] = query.float().clone().contiguous()
    identity = {
        name: value
        for name, value in dataclasses.asdict(model or ModelIdentity()).items()
        if value is not None
    }
    metadata = {
        "kvswap_projection": FORMAT_VERSION,
        "kind": kind,
        "model": json.dumps(identity, sort_keys=True),
    }
    if heads != "all":
        metadata["heads"] = heads
    Path(path).write_bytes(_with_sorted_header(save(tensors, metadata=metadata)))


def _with_sorted_header(written: bytes) -> bytes:
    """The same file with its header's keys in order: safetensors' own order changes."""
    size = int.from_bytes(written[:8], "little")
    header = json.loads(written[8 : 8 + size])
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + written[8 + size :]


def load_projections(
    path: str | Path,
    ranks: Sequence[int],
    width: int,
    model: ModelIdentity | None = None,
    heads: str = "all",
) -> list[Pair]:
    """Reads a projection for each layer, cut to that layer's rank.

    Parameters
    ----------
    ranks
        Columns wanted of each layer on disk.
    width
        Rows: ``kv_heads * head_dim``.
    model
        The model it will be used with; compared with the one in the file.
    heads
        Who chooses, as in `SwapConfig`: what the file was calibrated for.

    Raises
    ------
    ConfigError
        Missing or broken file, another model's, for other heads, a layer missing, wrong shape, too
        few columns, or a number that is not finite.
    """
    where = f"projection {path}"
    try:
        check_safetensors(path)
        with safe_open(str(path), framework="pt") as file:
            _check_metadata(where, file.metadata() or {}, model, heads)
            names = set(file.keys())
            return [
                _pair(where, file, names, layer, rank, width) for layer, rank in enumerate(ranks)
            ]
    except ConfigError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{where}: must be a readable safetensors file: {error}") from error


def _word(heads: str) -> str:
    """As a config file has it."""
    return str(renamed("heads", heads)[1])


def _check_metadata(
    where: str, metadata: dict[str, str], model: ModelIdentity | None, heads: str
) -> None:
    version = metadata.get("kvswap_projection")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{where}: metadata kvswap_projection must be {FORMAT_VERSION!r}, got {version!r}; "
            "calibrate again with this kvswap_torch"
        )
    calibrated_for = metadata.get("heads", "all")
    if calibrated_for != heads:
        raise ConfigError(
            f"{where}: must be calibrated for selection.heads {_word(heads)}, was for "
            f"{_word(calibrated_for)}; calibrate for it, or leave summary.projection_file out"
        )
    try:
        written_for = identity_from(strict_json(metadata.get("model", "{}")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: metadata model must describe a model: {error}") from error
    differences = written_for.differences(model) if model else {}
    if differences:
        told = ", ".join(f"{n} {ours} (this model: {it})" for n, (ours, it) in differences.items())
        raise ConfigError(
            f"{where}: must be for the model it is used with, but was made for {told}; calibrate "
            "this model, or leave summary.projection_file out"
        )


def _pair(where: str, file: Any, names: set[str], layer: int, rank: int, width: int) -> Pair:
    matrices = []
    for role in ("key", "query"):
        name = f"layers.{layer}.{role}"
        if name not in names:
            raise ConfigError(f"{where}: must have {name}, has only {len(names)} other tensors")
        matrix = file.get_tensor(name)
        rows, columns = matrix.shape if matrix.dim() == 2 else (0, 0)
        if rows != width or columns < rank or not matrix.is_floating_point():
            raise ConfigError(
                f"{where}: {name} must be floats [{width}, at least {rank}], got "
                f"{matrix.dtype} {list(matrix.shape)}; calibrate again, or lower summary.rank"
            )
        matrix = matrix[:, :rank].to(torch.float32).contiguous()
        if not torch.isfinite(matrix).all():
            raise ConfigError(f"{where}: {name} must be finite, has NaN or infinity; restore it")
        matrices.append(matrix)
    return matrices[0], matrices[1]
