"""Will a model, its cache and a context fit? And if not, what to turn."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.few_bits import BITS
from kvswap_torch.hf.unloaded import (
    Activations,
    CachePlan,
    activations,
    plan_cache,
    unloaded_model,
    weight_bytes,
)
from kvswap_torch.hf.weights_memory import Stored, WeightsPlan, plan_weights
from kvswap_torch.memory_size import format_bytes

CONTEXT_LEAST = 1024  # a shorter one is not proposed
STEP = 1 << 20  # a proposed budget is a multiple of it


@dataclass(frozen=True)
class Asked:
    """What is to be run.

    Parameters
    ----------
    config, dtype
        The model's transformers config, and the type of what it computes with.
    context, batch
        Tokens of a sequence, prompt and answer, and sequences.
    weights
        Their format; None: of `dtype`.
    stored_bytes
        Of weights that are quantised in the checkpoint already: what its files have. None: others.
    kv_memory_bytes, path, settings, preset
        As for `KVSwapCache`.
    chunk
        Tokens of a prompt per forward pass.
    is_wide
        As for `activations`.
    stored
        What the checkpoint's files have; None: all of `dtype`.
    """

    config: Any = field(repr=False)
    dtype: torch.dtype
    context: int
    batch: int = 1
    weights: str | None = None
    stored_bytes: int | None = None
    kv_memory_bytes: int | None = None
    path: str | Path | None = "."
    settings: Any = None
    preset: str | None = None
    chunk: int = 4096
    is_wide: bool = False
    stored: Stored | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ModelAsked:
    """A model's config, equal to others that say the same."""

    said: str
    dtype: torch.dtype
    weights: str | None
    config: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class Place:
    """What there is: bytes of memory and of disk, and what interpreter and libraries take."""

    memory_bytes: int
    disk_bytes: int
    fixed_bytes: int


@dataclass(frozen=True)
class Fit:
    """What it takes, in bytes."""

    asked: Asked
    fixed: int
    weights: int
    activations: Activations
    cache: CachePlan

    @property
    def memory_bytes(self) -> int:
        return self.fixed + self.weights + self.activations.bytes + self.cache.memory_bytes

    @property
    def disk_bytes_per_token(self) -> float:
        """Of one sequence."""
        return self.cache.disk_bytes / (self.asked.batch * self.asked.context)

    def fits(self, place: Place) -> bool:
        return self.memory_bytes <= place.memory_bytes and self.cache.disk_bytes <= place.disk_bytes


def estimate(asked: Asked, fixed: int) -> Fit:
    """What it takes; `fixed` as in `Place`.

    Raises
    ------
    UnsupportedModelError, ConfigError, BudgetError
        As `KVSwapCache`.
    """
    model, weights, held = _of_model(asked)
    cache = plan_cache(
        model,
        asked.path,
        config=asked.settings,
        preset=asked.preset,
        kv_memory_bytes=asked.kv_memory_bytes,
        max_context=asked.context,
        max_batch=asked.batch,
    )
    return Fit(asked, fixed, weights, held, cache)


def _of_model(asked: Asked) -> tuple[Any, int, Activations]:
    """The model without weights; bytes of weights, and activations."""
    said = f"{type(asked.config)} {asked.config.to_json_string()}"
    shape = ModelAsked(said, asked.dtype, asked.weights, asked.config)
    model, weights = _unloaded(shape)
    chunk = min(asked.chunk, asked.context)
    held = _activations(shape, asked.batch, chunk, asked.is_wide)
    return model, weights if asked.stored_bytes is None else asked.stored_bytes, held


# A second for each large model, and advice asks for the same one with other options.
@functools.lru_cache(maxsize=16)
def _unloaded(shape: ModelAsked) -> tuple[Any, int]:
    config = copy.deepcopy(shape.config)  # loading writes the dtype into it
    model = unloaded_model(config, shape.dtype, shape.weights)
    return model, weight_bytes(model)


@functools.lru_cache(maxsize=64)
def _activations(shape: ModelAsked, batch: int, chunk: int, is_wide: bool) -> Activations:
    return activations(_unloaded(shape)[0], batch, chunk, is_wide)


def advice(fit: Fit, place: Place) -> str:
    """The first thing that makes it fit, in one sentence; empty where it does."""
    if fit.fits(place):
        return ""
    for options, asked in _changes(fit, place):
        try:
            changed = estimate(asked, fit.fixed)
        except BudgetError:
            continue
        if changed.fits(place):
            return f"give {options}: then it takes {format_bytes(changed.memory_bytes)} of memory"
    if fit.cache.disk_bytes > place.disk_bytes:
        return (
            f"the disk must have {format_bytes(fit.cache.disk_bytes)} free and has "
            f"{format_bytes(place.disk_bytes)}: free space, or give another --path"
        )
    if (plan := weights_on_disk(fit, place)) is not None:
        beside = fit.memory_bytes - fit.weights
        taken = format_bytes(plan.memory_bytes + beside)
        return f"give --weights-memory {_room(fit, place) // STEP}MiB: then it takes {taken}"
    return "no option makes it fit: take a smaller model, or a machine with more memory"


def weights_on_disk(fit: Fit, place: Place) -> WeightsPlan | None:
    """Which layers are on disk so that all else fits in memory as it was asked for.

    Returns
    -------
    WeightsPlan or None
        None: nothing need be, or that does not make it fit.
    """
    asked, room = fit.asked, _room(fit, place)
    can_be = asked.stored_bytes is None and asked.weights not in BITS
    has_disk = fit.cache.disk_bytes <= place.disk_bytes
    if fit.fits(place) or not can_be or not has_disk or room <= 0:
        return None
    model, _, _ = _of_model(asked)
    try:
        return plan_weights(model, asked.stored or Stored(asked.dtype), room)
    except ConfigError:
        return None


def _room(fit: Fit, place: Place) -> int:
    """What is left for weights."""
    return (place.memory_bytes - fit.memory_bytes + fit.weights) // STEP * STEP


def _changes(fit: Fit, place: Place) -> Iterator[tuple[str, Asked]]:
    """Options, and what is asked with them; those that change answers least come first."""
    asked = fit.asked
    for weights in _formats(asked):
        said = "" if weights == asked.weights else f"--weights {weights}"
        turned = dataclasses.replace(asked, weights=weights)
        if said:
            yield said, turned
        _, taken, held = _of_model(turned)
        room = (place.memory_bytes - fit.fixed - taken - held.bytes) // STEP * STEP
        if 0 < room < (asked.kv_memory_bytes or room + 1):
            budget = f"--kv-memory {room // STEP}MiB"
            yield f"{said} {budget}".strip(), dataclasses.replace(turned, kv_memory_bytes=room)
    context = asked.context // 2
    while context >= CONTEXT_LEAST:
        yield f"--context {context}", dataclasses.replace(asked, context=context)
        context //= 2
    if asked.batch > 1:
        yield "--batch 1", dataclasses.replace(asked, batch=1)


def _formats(asked: Asked) -> list[str | None]:
    """The one that was asked for, and those of fewer bits."""
    if asked.stored_bytes is not None or asked.weights == "int4":
        return [asked.weights]
    return [asked.weights, *(["int4"] if asked.weights == "int8" else BITS)]
