"""`KVSwapCache`: a transformers cache whose full-attention layers live on disk."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import KVSwapError
from kvswap_torch.hf import convert, passes
from kvswap_torch.hf.attention import Switch, check_switched, refuse_weights
from kvswap_torch.hf.driver import Ahead, SessionDriver
from kvswap_torch.hf.edits import check_removed, check_repeats, chosen_sequences, forget
from kvswap_torch.hf.elsewhere import LayerElsewhere
from kvswap_torch.hf.families import ModelParts, model_parts
from kvswap_torch.hf.hooks import Hooks
from kvswap_torch.hf.indexed import IndexedLayer
from kvswap_torch.hf.layer import DiskLayer, disarm
from kvswap_torch.hf.lookahead import LookAhead, attention_scale
from kvswap_torch.hf.not_copied import NotCopied
from kvswap_torch.hf.open_pass import OpenPass, all_or_none
from kvswap_torch.hf.opening import Wish, layers_of, open_on_all_ranks
from kvswap_torch.hf.own_passes import OwnPasses
from kvswap_torch.hf.plug_ins import PlugIns
from kvswap_torch.hf.prefill_bar import PrefillBar
from kvswap_torch.hf.saving import Saving
from kvswap_torch.hf.settings import Budget
from kvswap_torch.hf.stats import CacheStats, collect
from kvswap_torch.hf.token_log import TokenLog
from kvswap_torch.hf.trial import try_attention
from kvswap_torch.hf.vision_positions import VisionPositions
from kvswap_torch.plug_ins import GroupScores, TokenScores
from kvswap_torch.positions import Reach
from kvswap_torch.process_memory import MemoryReturns


class KVSwapCache(convert.Converting, Saving, OwnPasses, NotCopied, Cache):
    """A KV cache on disk, for stock ``generate()``.

    ::

        with KVSwapCache(model, path="/fast/disk") as cache:
            out = model.generate(**inputs, **cache.as_argument(), max_new_tokens=200)
            print(cache.stats())

    States: open -> closed, by `close`, at the end of a ``with`` block, when it is collected, or at
    interpreter exit. While one is open the model's attention implementation is "kvswap"; other
    caches of the same model go on working, and so do other threads, each with a cache of its own.

    Not for: training, ``torch.compile`` of the model after the cache was opened, a forked child, or
    more than one thread or generation at a time in one cache.

    A forward pass that ends in an exception, a full disk or a Ctrl-C, is taken back before the next
    use: the cache holds what it held before, and the same pass may be run again; where a recurrent
    state has changed, that use says so. `close` may be called while another thread runs a pass,
    which then ends with `ClosedError`.

    Parameters
    ----------
    model
        A decoder-only transformers model on the CPU or on one CUDA device, or PEFT's wrapper of
        one. Pages and summaries are where the model is.
    path
        A directory on the disk to use; nothing is left behind in it. None, where the settings drop
        tokens (``rows="none"`` and a keeper): what they drop is gone, and no file is opened.
    config
        A `SwapConfig`, the path of a config file, or None: a cache chooses for itself, and scores
        by mass where `SwapConfig()` has the paper's ``score="sum"``.
    kv_memory_bytes
        Hard limit for everything the cache keeps in memory, of the host and of the model's device
        together, as an int or like ``"256MiB"``. Rank, groups and pages are derived from it:
        without a config as large as it allows, with one at most as large as that says.
    max_context, max_batch
        Tokens per sequence and sequences to be ready for. Given both, they are checked and
        allocated now instead of at the first forward pass.
    timeline_spans
        How many spans of time to keep for ``stats(timeline=True)``, the newest ones; each takes
        40 bytes of the budget, and `kvswap_torch.timeline.SPANS` is a good number. 0 records
        nothing and costs nothing.
    progress
        Show a progress bar while a long prompt is read, also inside ``generate()``.
    preset
        In the place of a config: a published system, by its name in `kvswap_torch.presets()`.
    keep
        Of a preset that drops tokens: how many a layer attends, sinks and newest ones included. An
        int, or a float up to 1: that share of `max_context`, or of the model's longest text.
    group_scores
        Your own way to choose what is read, with ``rows="given"``; see `kvswap_torch.plug_ins`.
    token_scores
        Your own way to choose which tokens stay in memory, with ``keeper="given"``; see there.

    Raises
    ------
    UnsupportedModelError
        Naming what in the model cannot be kept on disk.
    ConfigError
        A setting, a config or a projection that is not usable, or another model's.
    BudgetError
        `kv_memory_bytes` is too small; names the minimum.
    StorageError
        `path` is missing, no directory, not writable, or without room for `max_context`.
    """

    def __init__(
        self,
        model: Any,
        path: str | Path | None = None,
        config: SwapConfig | str | Path | None = None,
        kv_memory_bytes: int | str | None = None,
        max_context: int | None = None,
        max_batch: int | None = None,
        timeline_spans: int = 0,
        progress: bool = False,
        preset: str | None = None,
        keep: float | None = None,
        group_scores: GroupScores | None = None,
        token_scores: TokenScores | None = None,
    ):
        self.parts = model_parts(model)
        try_attention(self.parts)
        limits = (kv_memory_bytes, max_context, max_batch)
        wish = Wish(
            path, config, preset, *limits, timeline_spans, keep, PlugIns(group_scores, token_scores)
        )
        if self.parts.placement.is_shared:
            open_on_all_ranks(self, wish)
        else:
            self._open(wish)
        shown = progress and self.parts.placement.rank == 0
        self.driver.preset = preset or ""
        queries_max = self.driver.config.selection.max_step_tokens
        self._bar = PrefillBar(len(self.parts.kinds), queries_max) if shown else None

    def _open(self, wish: Wish) -> dict[str, Any]:
        """Opens this process's part; returns what must be alike on all ranks, by name."""
        config, budget, projections, alike = wish.granted(self.parts)

        def make_driver(look_ahead: LookAhead) -> SessionDriver:
            rest = (config, budget, projections, look_ahead, wish.timeline_spans)
            return SessionDriver(self.parts, wish.path, *rest, wish.plug_ins)

        self._attach(config or SwapConfig(), budget, make_driver)
        return alike

    def _attach(self, settings: SwapConfig, budget: Budget, make_driver: Any) -> None:
        """Puts the model on a driver that is made here; undone by `close`, or an exception."""
        self._others_changed = False  # a pass has begun to change layers that are not on disk
        self._predicting: tuple[int, dict[str, Any]] | None = None  # after this layer's attention
        self._pass: OpenPass | None = None  # under way, or ended by an exception
        self._entering = threading.Lock()
        self._memory = MemoryReturns()
        self.tokens = TokenLog()
        self._reach, self._vision = Reach(self.parts.config), VisionPositions(self.parts)
        self._look_ahead = LookAhead(self.parts, budget.kv_memory_bytes, settings.ranks_by_sum)
        with contextlib.ExitStack() as undo:
            self.driver = make_driver(self._look_ahead)
            undo.callback(self.driver.close)
            super().__init__(layers=layers_of(self.parts, self.driver))
            switch = Switch.acquire(self.parts)
            undo.callback(switch.release)
            hooks = Hooks(self, switch)
            undo.callback(hooks.remove)
            undo.callback(self.driver.refuse)
            # Not a method: it must not keep the cache alive, and runs at interpreter exit too.
            self._finalizer = weakref.finalize(self, undo.pop_all().close)

    # What generate() and models ask.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache, padding included; never the number that a step attends."""
        self._make_usable()
        if layer_idx < len(self.layers):
            layer = self.layers[layer_idx]
            if isinstance(layer, DiskLayer | LayerElsewhere):
                return layer.get_seq_length()
        return super().get_seq_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """``max_context``, or -1 when it was not given."""
        if layer_idx is None:
            return self.driver.max_context
        return super().get_max_length(layer_idx)

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        """Sequences in the cache; -1 while it is empty."""
        self._make_usable()
        return self.driver.session.batch() or -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def __bool__(self) -> bool:
        """False while empty.

        Also up to a model's original length where it has one: Phi-3 drops a true cache that a
        generation takes past it, and goes on in memory. Crossing it raises instead.
        """
        original = getattr(self.parts.config, "original_max_position_embeddings", None)
        return not self.closed and self.get_seq_length() > (original or 0)

    # What changes the whole cache.

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest ``-tokens_to_remove`` tokens, as transformers' caches do.

        Parameters
        ----------
        tokens_to_remove
            A negative number; 0 removes nothing.

        Raises
        ------
        ValueError
            For a positive number, which once meant the length to keep.
        StorageError
            When what returns to memory cannot be read: nothing has changed, or the crop is
            unfinished, and is to be made again (docs/faults.md).
        """
        self._make_usable()
        tokens_to_remove = check_removed(tokens_to_remove)
        with all_or_none(self.layers_elsewhere(), "crop", tokens_to_remove):
            if tokens_to_remove < 0:
                self.driver.crop(max(0, self.driver.positions() + tokens_to_remove))
                self.tokens.crop(self.driver.positions())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence i goes on as sequence ``beam_idx[i]``; nothing is rewritten on disk."""
        self._select("reorder_cache", beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences `indices`: numbers, from the end where negative, or a mask."""
        self._select("batch_select_indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, one after the other."""
        self._make_usable()
        repeats = check_repeats(repeats)
        with all_or_none(self.layers_elsewhere(), "batch_repeat_interleave", repeats):
            self._go_on_with([i for i in range(self.batch_size) for _ in range(repeats)])

    def _select(self, call: str, indices: Any) -> None:
        self._make_usable()
        batch, takes_mask = max(0, self.batch_size), call == "batch_select_indices"
        chosen = chosen_sequences(call, indices, batch, takes_mask=takes_mask)
        with all_or_none(self.layers_elsewhere(), call, torch.tensor(chosen)):
            self._go_on_with(chosen)

    def _go_on_with(self, indices: list[int]) -> None:
        self.driver.select_sequences(indices)
        self.tokens.select(indices)

    def reset(self) -> None:
        """Forgets all tokens, so that the cache can be used for another text."""
        self.driver.reset()  # first: a plug-in may raise, and nothing is forgotten then
        for layer in self.layers_elsewhere():
            forget(layer)
        self.tokens.reset()
        self._others_changed, self._pass = False, None

    def stats(self, timeline: bool = False) -> CacheStats:
        """Counts since the cache was opened, and the memory it uses; prints as a table.

        Parameters
        ----------
        timeline
            Also what was recorded of single steps: `CacheStats.timeline`, to be saved for Perfetto.

        Raises
        ------
        ValueError
            For a timeline of a cache that was opened without `timeline_spans`.
        """
        self.driver.check_open()
        return collect(self.driver, self._memory.memory(), timeline)

    # Its life.

    document: str = ""  # what it was read from, which a saved cache tells

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Frees disk and memory and restores the model's own attention. Idempotent."""
        self._finalizer()
        if self._bar is not None and not self.is_in_pass:
            self._bar.end()

    def __enter__(self) -> KVSwapCache:
        self.driver.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.get_seq_length()} tokens"
        return f"KVSwapCache({self.parts.name}, {len(self.parts.disk)} layers on disk, {state})"

    # What its hooks call.

    def begin_pass(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
        """`module`, the decoder or one around it, was called with this cache.

        Returns whether a pass begins with it, and is not under way.
        """
        self.driver.check_open()
        with self._entering:
            if self._pass is not None and self.is_in_pass:
                self._pass.check_thread()
                return False
            try:
                check_switched(self.parts.config)
            except KVSwapError:
                self.driver.check_open()  # another thread's close() gives the attention back
                raise
            refuse_weights(self.parts.config, kwargs)
            self._make_usable()
            self.tokens.crop(self.driver.positions())
            self.tokens.begin(args, kwargs)
            self._pass = OpenPass(module, self.driver.begin_pass(), self.layers_elsewhere())
            return True

    def end_pass(self, module: nn.Module, is_whole: bool) -> None:
        """`module` has run, to its end or not."""
        if self._pass is not None and self._pass.is_of(module):
            if self._bar is not None:
                self._bar.end()
            if is_whole:
                done, self._pass, self._others_changed = self._pass, None, False
                self.tokens.commit(positions := self.driver.positions())
                self._reach.note(positions)
                self._vision.note()
                if positions - done.positions > self.driver.config.selection.max_step_tokens:
                    self._memory.after(time.perf_counter() - done.began)
            else:
                self._pass.fail()
                self._predicting = None
                disarm(self.layers)

    def _make_usable(self) -> None:
        """Before each use, since a Ctrl-C runs no hook: a failed pass leaves no trace."""
        self.driver.check_open()
        if self._pass is None or self._pass.is_running():
            return
        if self._others_changed:
            self._pass.take_back_others()
        self.driver.take_back(self._pass.positions)
        disarm(self.layers)
        self._pass, self._others_changed, self._predicting = None, False, None
        if self._bar is not None:
            self._bar.end()

    def before_layer(
        self, index: int, module: nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Layer `index` is about to run: declares padding, arms it, looks ahead to the next."""
        batch, tokens = hidden.shape[:2]
        if self._bar is not None:
            self._bar.layer(index, tokens, self.driver.expected)
        if index == self.parts.disk[0]:
            padding = _padding_of(self.parts, kwargs.get("attention_mask"))
            self.driver.begin_forward(batch, tokens, padding)
        layer = self.layers[index]
        if isinstance(layer, DiskLayer):
            layer.arm()
            passes.attend_next(module, layer)
        self._others_changed |= not isinstance(layer, DiskLayer) or isinstance(layer, IndexedLayer)
        target = self.parts.disk_index.get(index + 1)
        ahead = Ahead.NO if target is None else self.driver.wants_look_ahead(target, batch, tokens)
        if ahead == Ahead.NO:
            return
        if ahead == Ahead.ANY_QUERY:
            self.driver.read_ahead(target, tokens)
            return
        is_verified = self.driver.config.prefetch.mode == "verify"
        if is_verified and index in self._look_ahead.after_attention:
            self._predicting = index, kwargs
            return
        began_ns = time.monotonic_ns()
        query = self._look_ahead.predict(index + 1, index, hidden, kwargs)
        self._look_ahead_with(query, index + 1, began_ns)

    def after_attention(self, index: int, residual: torch.Tensor) -> None:
        """Layer `index` has attended: predicts for the next one, where it is verified."""
        waiting, self._predicting = self._predicting, None
        if waiting is None or waiting[0] != index:
            return
        began_ns = time.monotonic_ns()
        query = self._look_ahead.predict_after_attention(index + 1, residual, waiting[1])
        self._look_ahead_with(query, index + 1, began_ns)

    def _look_ahead_with(self, query: torch.Tensor | None, index: int, began_ns: int) -> None:
        if query is not None:
            attention = self.parts.mixers[index]
            assert attention is not None  # a layer on disk attends
            scale = attention_scale(attention, query.shape[-1])
            self.driver.look_ahead(self.parts.disk_index[index], query, scale, began_ns)

    def norms_after_attention(self) -> dict[int, nn.Module]:
        """Per layer, what is called with the residual that the next query is predicted from."""
        return self._look_ahead.after_attention

    def layers_elsewhere(self) -> list[CacheLayerMixin]:
        """Those that are not on disk, and the keys of those that have an index."""
        self.driver.check_open()
        elsewhere: list[Any] = [each for each in self.layers if not isinstance(each, DiskLayer)]
        indexed = (each for each in self.layers if isinstance(each, IndexedLayer))
        return elsewhere + [each.index_keys for each in indexed]


def _padding_of(parts: ModelParts, mask: torch.Tensor | None) -> torch.Tensor | None:
    """``[batch, positions]``. An index has ``[batch, 1, tokens, positions]``: its newest token may
    look at all that is no padding.
    """
    return mask[:, 0, -1] if parts.index_topk and mask is not None else mask
