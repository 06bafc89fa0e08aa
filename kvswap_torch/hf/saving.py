"""A cache that outlives its process: `save`, `open` and `fork` of a `KVSwapCache`."""

from __future__ import annotations

import json
import os
import warnings
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvswap_torch.config import SwapConfig, v1
from kvswap_torch.errors import BudgetError, ConfigError, CorruptionError, KVSwapError
from kvswap_torch.few_bits import format_of
from kvswap_torch.hf import saved_layers
from kvswap_torch.hf.driver import SessionDriver
from kvswap_torch.hf.elsewhere import LayerElsewhere
from kvswap_torch.hf.families import ModelParts, model_parts
from kvswap_torch.hf.indexed import IndexedLayer
from kvswap_torch.hf.key_probe import probe as probe_keys
from kvswap_torch.hf.layer import DiskLayer
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.hf.opening import check_spans
from kvswap_torch.hf.saved_checks import (
    check_made_by,
    check_tokens,
    check_values,
    known_of,
    rotary_of,
    warn_of_readers,
)
from kvswap_torch.hf.saved_facts import tensors_of
from kvswap_torch.hf.session import Session
from kvswap_torch.hf.settings import Budget, FirstPass, budget_of
from kvswap_torch.hf.trial import try_attention
from kvswap_torch.hf.weights_digest import weights_of
from kvswap_torch.saved_path import named, text_of

if TYPE_CHECKING:
    from kvswap_torch._C import CacheOptions, SavedCache, TensorCache
    from kvswap_torch.hf.cache import KVSwapCache


@dataclass(frozen=True)
class Start:
    """What a cache goes on from, beside its session's own content."""

    session: Session
    config: SwapConfig
    ranks: list[int]
    calibrated: bool
    estimated: dict[int, str]
    valid: torch.Tensor | None  # [batch, positions]
    ids: torch.Tensor | None  # [batch, positions]
    source: str
    may_sum: bool  # there is memory for predictors with summed projections


class ContinuedDriver(SessionDriver):
    """A driver whose session is there already: a saved one's, or a fork's."""

    def __init__(self, *arguments: Any, start: Start, **named: Any):
        self._start = start
        projections = [] if start.calibrated else None
        super().__init__(*arguments, projections=projections, **named)
        self._settles_at_once = self._settled = True
        self._longest = max(0, start.session.common_positions())
        self.estimates.kinds = dict(start.estimated)
        self.padding.restore(start.valid)

    def _open(self, first: Any) -> None:
        start = self._start
        if not start.may_sum:
            self._predictor.take_apart()
        if start.config.predicts:
            self._predictor.build()
        self._hold(start.session, start.config, start.ranks)
        fallbacks = start.session.facts()["fallbacks"]
        if fallbacks:
            warnings.warn(f"KVSwapCache: {fallbacks}", RuntimeWarning, stacklevel=2)

    def _open_for(self, first: FirstPass) -> None:
        """The session is not opened again: another text begins with the settings that it has."""
        self.estimates.kinds.clear()
        self.first_pass = None
        self.redivision.forget()


class Saving:
    """The part of `KVSwapCache` that saves, opens and forks."""

    @property
    def token_ids(self: KVSwapCache) -> torch.Tensor | None:
        """``[batch, tokens]`` int64 on the host: what the cache has read.

        None while it is empty, or where a pass was given embeddings in the place of ids.
        """
        self._make_usable()
        self.tokens.crop(self.driver.positions())
        return self.tokens.ids

    def save(self: KVSwapCache, path: str | Path, overwrite: bool = False) -> None:
        """Writes all that the cache holds to a folder, for `open` in another process.

        The folder is complete or absent, whatever ends the process, and on the disk when this
        returns. The cache goes on working. Where the session's file is on the same file system it
        becomes the folder's without a copy, and new records go to another one.

        Who has the folder has the text: use a file system that encrypts where that matters. It is
        0700, its files 0600.

        Parameters
        ----------
        path
            Of the folder, such as ``"book.kvswap"``; its parent must exist.
        overwrite
            Replace a saved cache of that name, unless somebody uses it.

        Raises
        ------
        StorageError
            The path is taken, in use, or its disk is full.
        CorruptionError
            A record was damaged: nothing is saved.
        KVSwapError
            The cache is empty, or one process's part of a model that several run.
        """
        self._make_usable()
        self.driver.plug_ins.refuse_leaving("save")
        if self.parts.placement.is_shared:
            raise KVSwapError(
                "save: the cache must be one process's, and this one is a part of a model that "
                "several processes run; save from a model that one process runs"
            )
        if self.driver.positions() == 0:
            raise KVSwapError("save: the cache must hold tokens, and is empty; prefill first")
        tensors: dict[str, torch.Tensor] = {}
        in_memory = [_in_memory(layer) for layer in self.layers]
        others = [
            None if layer is None else saved_layers.pack_layer(i, layer, tensors)
            for i, layer in enumerate(in_memory)
        ]
        if (ids := self.token_ids) is not None:
            tensors["token_ids"] = ids
        if self.driver.padding.valid is not None:
            tensors["valid"] = self.driver.padding.valid
        if self._vision.deltas is not None:
            tensors["rope_deltas"] = self._vision.deltas.detach().cpu()
        facts = {
            "model": known_of(self.parts.identity),
            "name": _found_anywhere(getattr(self.parts.outermost.config, "_name_or_path", "")),
            "rotary": rotary_of(self.parts),
            "calibrated": self.driver.projection_source == "file",
            "estimated": self.driver.estimates.kinds,
            "layers": others,
            "weights": weights_of(self.parts).facts(),
        }
        if (weights := format_of(self.parts.outermost)) is not None:
            facts["weights_format"] = weights
        if self.document:
            facts["document"] = self.document
        self.driver.session.save(named(path), overwrite, json.dumps(facts), tensors)

    @classmethod
    def open(
        cls,
        model: Any,
        saved: str | Path,
        path: str | Path = ".",
        kv_memory_bytes: int | str | None = None,
        max_context: int | None = None,
        max_batch: int | None = None,
        timeline_spans: int = 0,
        probe: bool = True,
        input_ids: torch.Tensor | None = None,
    ) -> KVSwapCache:
        """A cache that goes on from a saved one, with that one's settings.

        Nothing of `saved` is changed, and no record is read but those of the probe. While the cache
        lives, `saved` is locked: others may open it too, and nobody may remove it.

        Parameters
        ----------
        model
            The model that it was made by.
        saved
            The folder that `save` wrote.
        path
            A directory on the disk for what comes now.
        kv_memory_bytes, max_context, max_batch, timeline_spans
            As for `KVSwapCache`. With little memory fewer pages are kept for reuse, which changes
            no answer.
        probe
            Compare the model's weights with what is kept of those that the cache was made by,
            and keys and values of the first 16 tokens with saved ones.
        input_ids
            ``[batch, tokens]`` or ``[tokens]``: what the cache must begin with.

        Raises
        ------
        ConfigError
            It is another model's, of a newer version, or has other tokens: the first is named.
        CorruptionError
            It is damaged.
        StorageError
            It is not there, or `path` is not usable.
        BudgetError
            `kv_memory_bytes` is too small; names the minimum.
        """
        from kvswap_torch import _C

        parts = model_parts(model)
        if parts.placement.is_shared:
            raise KVSwapError("open: a saved cache is opened by one process alone so far")
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"path: must name a folder on a disk, got {path!r}")
        check_spans(timeline_spans)
        budget = budget_of(kv_memory_bytes, max_context, max_batch)
        folder = _C.SavedCache(named(saved))
        warn_of_readers(folder.path)
        facts = json.loads(folder.facts)
        check_made_by(facts, parts, folder.path, probe)
        try_attention(parts)
        tensors = tensors_of(folder)
        check_tokens(tensors.get("token_ids"), input_ids, folder.path)
        config = _config_of(folder, parts)
        memory = budget.kv_memory_bytes

        def opened(beside: int) -> tuple[CacheOptions, TensorCache]:
            beside += parts.index_bytes(max_batch or folder.sequences, max_context or folder.tokens)
            left = None if memory is None else max(1, memory - beside)
            options = folder.options(text_of(path), left, max_context, max_batch, timeline_spans)
            check_values(options.value_dim, parts, folder.path)
            options.device = str(parts.device)
            options.is_calibrated = facts["calibrated"]
            return options, _C.TensorCache(options, folder)

        beside = _predictor_bytes(parts, config, budget)
        try:
            options, session = opened(beside)
        except BudgetError:
            if beside == 0:
                raise
            options, session = opened(beside := 0)
        start = Start(
            session=session,
            config=config.with_settings({"memory.pages_per_layer": options.pages_max}),
            ranks=list(options.ranks),
            calibrated=options.is_calibrated,
            estimated={int(layer): kind for layer, kind in facts["estimated"].items()},
            valid=tensors.get("valid"),
            ids=tensors.get("token_ids"),
            source=folder.path,
            may_sum=memory is None or beside > 0,
        )
        parts = parts.recorded(options.value_dim)
        cache = _continued(cls, parts, path, budget, start, timeline_spans)
        cache.document = facts.get("document", "")
        try:
            _restore_layers(cache, facts, tensors, folder.path)
            cache._vision.restore(tensors.get("rope_deltas"), parts.device)
            if probe:
                cache.driver.probe = probe_keys(cache, cache.tokens.ids, start.valid)
            else:
                cache.driver.probe = "skipped: probe=False"
        except BaseException:
            cache.close()
            raise
        return cache

    def fork(self: KVSwapCache) -> KVSwapCache:
        """Another cache that goes on from here; both have their own memory and new tokens.

        Records and what is summarised of them are shared, and stay until the last of the two is
        closed. One of them counts the summary (`CacheStats.shared_bytes` of the other). Each has a
        budget of its own, as large as this one's, which holds what it shares too: it stays within
        that whichever is closed first. In one process they take turns, as caches do.

        Raises
        ------
        KVSwapError
            The cache is empty, or one process's part of a model that several run.
        """
        self._make_usable()
        self.driver.plug_ins.refuse_leaving("fork")
        if self.parts.placement.is_shared:
            raise KVSwapError("fork: the cache must be one process's, and this one is a part")
        if self.driver.positions() == 0:
            raise KVSwapError("fork: the cache must hold tokens, and is empty; prefill first")
        driver = self.driver
        start = Start(
            session=driver.session.fork(),
            config=driver.config,
            ranks=list(driver.ranks),
            calibrated=driver.projection_source == "file",
            estimated=dict(driver.estimates.kinds),
            valid=driver.padding.valid,
            ids=self.token_ids,
            source="fork",
            may_sum=self._look_ahead.summed,
        )
        spans = driver.timeline_spans
        cache = _continued(type(self), self.parts, driver.path, driver.budget, start, spans)
        cache.driver.follow(driver)
        cache._vision.deltas = self._vision.deltas
        for index, layer in enumerate(self.layers):
            if isinstance(layer, IndexedLayer):
                cache.layers[index].index_keys = deepcopy(layer.index_keys)
            elif not isinstance(layer, DiskLayer | LayerElsewhere):
                cache.layers[index] = deepcopy(layer)
        return cache


def _continued(
    cls: type[KVSwapCache],
    parts: ModelParts,
    path: str | Path,
    budget: Budget,
    start: Start,
    timeline_spans: int,
) -> KVSwapCache:
    cache = cls.__new__(cls)
    cache.parts = parts
    cache._bar = None

    def make_driver(look_ahead: LookAhead) -> SessionDriver:
        return ContinuedDriver(
            parts,
            path,
            start.config,
            budget,
            look_ahead=look_ahead,
            start=start,
            timeline_spans=timeline_spans,
        )

    try:
        cache._attach(start.config, budget, make_driver)
    except BaseException:
        start.session.close()
        raise
    cache.tokens.ids = start.ids
    return cache


def _found_anywhere(model: str) -> str:
    """A model's folder by its absolute path; a name of the Hub as it is."""
    return os.path.abspath(model) if model and os.path.isdir(model) else model


def _in_memory(layer: Any) -> Any:
    """What of a cache's layer a session does not hold: all of it, its index, or None."""
    if isinstance(layer, IndexedLayer):
        return layer.index_keys
    return None if isinstance(layer, DiskLayer) else layer


def _restore_layers(cache: KVSwapCache, facts: dict, tensors: dict, path: str) -> None:
    session = cache.driver.session
    try:
        held = session.batch(), session.common_positions()
        for index, packed in enumerate(facts["layers"]):
            layer = _in_memory(cache.layers[index])
            if layer is not None:
                saved_layers.unpack_layer(packed, layer, tensors, cache.parts.device)
                saved_layers.check_layer(layer, *held)
            if isinstance(cache.layers[index], IndexedLayer):
                cache.layers[index].check_index(cache.parts.mixers[index], *held)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CorruptionError(f"open: {path} must hold this model's layers: {error}") from error


def _config_of(folder: SavedCache, parts: ModelParts) -> SwapConfig:
    """A saved cache's.

    Raises
    ------
    ConfigError
        It chooses by scores that nobody gives.
    """
    config = SwapConfig(**_settings_of(folder))
    if config.summary.kind == "user" and not parts.index_topk:
        raise ConfigError(
            f"open: {folder.path} chooses by scores of a program's own (summary.kind='user'), "
            "which a saved cache has none of; open it with the program that wrote it"
        )
    return config


def _settings_of(folder: SavedCache) -> dict[str, Any]:
    """A `SwapConfig`'s arguments; a manifest of version 1 has those of a config of version 1."""
    manifest = json.loads(folder.manifest)
    settings = manifest["settings"]
    return v1.upgrade(settings) if manifest["kvswap_cache"] == 1 else settings


def _predictor_bytes(parts: ModelParts, config: SwapConfig, budget: Budget) -> int:
    if not config.predicts or budget.kv_memory_bytes is None:
        return 0
    return LookAhead(parts, budget.kv_memory_bytes, config.ranks_by_sum).nbytes
