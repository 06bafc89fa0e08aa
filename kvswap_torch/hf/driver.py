"""Drives a session through a model's forward passes."""

from __future__ import annotations

import enum
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from kvswap_torch.chunks import pass_of
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import ClosedError, KVSwapError
from kvswap_torch.hf import indexed
from kvswap_torch.hf import session as session_module
from kvswap_torch.hf.estimates import Estimates
from kvswap_torch.hf.families import ModelParts, refuse_rope_crossing
from kvswap_torch.hf.growth import ExplainedGrowth
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.hf.need import CacheNeed
from kvswap_torch.hf.no_gradient import NoGradient
from kvswap_torch.hf.padding import Padding
from kvswap_torch.hf.plug_ins import PlugIns
from kvswap_torch.hf.redivision import Redivision
from kvswap_torch.hf.rotary import rotary_channels
from kvswap_torch.hf.session import ScoreTerms, Session
from kvswap_torch.hf.settings import Budget, FirstPass, ready_for, settle
from kvswap_torch.native import cache_options
from kvswap_torch.projection import Pair

logger = logging.getLogger("kvswap_torch")


class Ahead(enum.IntEnum):
    """As kvswap::LookAhead: whether a layer is worth a look ahead."""

    NO = 0
    ANY_QUERY = 1  # all of it is attended, so that nothing must be predicted
    PREDICTED = 2


class SessionDriver:
    """The state a cache has beside the session: settings, validity of positions, projections.

    `look_ahead` is built, and counted in the budget, where the settings ask for it.

    States: open -> closed. A session is opened at once, so that a wrong path is reported at once,
    and again at the first forward pass when the settings depend on that pass's batch and length.

    Thread rules: as the session's, one thread at a time.
    """

    session: Session  # the one that is open; a closed one stays, to raise ClosedError
    first_pass: FirstPass | None = None  # that the settings were chosen for
    probe = ""  # of an opened saved cache: whether it was compared with the model
    preset = ""  # that it was opened with

    def __init__(
        self,
        parts: ModelParts,
        path: str | Path | None,
        config: SwapConfig | None,
        budget: Budget,
        projections: list[Pair] | None,
        look_ahead: LookAhead,
        timeline_spans: int = 0,
        plug_ins: PlugIns | None = None,
    ):
        self.parts = parts
        self.plug_ins = plug_ins or PlugIns()
        self.plug_ins.check_free()
        self.padding = Padding()
        self.timeline_spans = timeline_spans
        self.path = None if path is None else os.path.abspath(path)  # also after a chdir()
        self.given = config
        self.budget = budget
        self._predictor = look_ahead
        self._projections = projections
        self.need = CacheNeed(
            parts,
            self.path,
            budget,
            look_ahead,
            calibrated=projections is not None,
            timeline_spans=timeline_spans,
            plug_ins=self.plug_ins,
        )
        self.estimates = Estimates(rotary_channels(parts))
        self._declared = False  # the session holds a validity that not all layers have taken
        self.expected = 0  # tokens of the pass, where they come in pieces
        self._narrowed = False  # the pass made padding of positions that were valid
        self._settles_at_once = budget.is_known or not budget.matters(config)
        self._settled = self._settles_at_once
        self._cuts: dict[tuple[int, str], int] = {}  # asked of single layers, not yet of all
        self._held = 0  # sequences when the pass began
        self._longest = 0  # positions that there were when any key was made, as far as is known
        self._began = 0  # positions when the pass began
        self._owner_pid, self.is_open = os.getpid(), True
        self.redivision = Redivision(self)
        self._open(None)
        self.plug_ins.belong_to(self)

    def _open(self, first: FirstPass | None) -> None:
        """Opens a session with settings for the first forward pass, or for what is known before."""

        def settled() -> SwapConfig:
            on_device = self.parts.device.type != "cpu"
            return settle(self.given, self.parts.shape, self.budget, self.need, first, on_device)

        config = self.need.search(settled)
        unlimited = self.budget.kv_memory_bytes is None
        before = vars(self).get("session")  # none while the cache is made
        if before is not None and unlimited and config == self.config:
            return  # the first pass changes nothing
        self.plug_ins.open(config, self.parts)
        beside = self.need.beside(config, *ready_for(self.budget, first))
        options = self.need.options(config, sum(beside.values()))
        if config.predicts:
            self._predictor.build()
        session: Session = session_module.open_session(options)
        room = None if self.budget.kv_memory_bytes is None else beside["plug_in"]
        session = self.plug_ins.wrap(session, config, room, lambda: self.padding)
        if before is not None:
            before.close()
        self._hold(session, config, options["ranks"])
        if not self.is_open:  # another thread has closed what was there before
            session.close()
            self.check_open()
        logger.info("settings: %s; on disk: %s", config, self.path)
        if fallbacks := session.facts()["fallbacks"]:
            logger.info("fell back: %s", fallbacks)
            warnings.warn(f"KVSwapCache: {fallbacks}", RuntimeWarning, stacklevel=2)
        # A budget may have lowered the rank; the first columns are the projection of that rank.
        for layer, pair in enumerate(self._projections or []):
            if not config.is_exact(layer):
                key, query = (matrix[:, : self.ranks[layer]].contiguous() for matrix in pair)
                session.set_projection(layer, key, query)

    def _hold(self, session: Session, config: SwapConfig, ranks: list[int]) -> None:
        """A session that is open, with its settings."""
        self.session, self.config, self.ranks = session, config, ranks
        self.estimates.serve(session, config)

    def divide(self, config: SwapConfig, text: FirstPass) -> None:
        """The session goes on with settings that differ in how they divide the budget."""
        beside = self.need.beside(config, *ready_for(self.budget, text))
        options = self.need.options(config, sum(beside.values()))
        self.session.divide(cache_options(**options))
        if config.predicts:
            self._predictor.build()
        self._hold(self.session, config, options["ranks"])

    # What the cache's layers ask.

    def check_open(self) -> None:
        """Asked before anything is computed: in a forked child even a product may wait for ever.

        Threads are not forked, and the libraries that torch computes with wait for theirs.
        """
        if not self.is_open:
            raise ClosedError("KVSwapCache: must be open, was closed; open another cache")
        if os.getpid() != self._owner_pid:
            raise ValueError(
                "KVSwapCache: must be used by the process that opened it, got a call from a forked "
                "child; open another cache in each process"
            )

    @property
    def max_context(self) -> int:
        return -1 if self.budget.max_context is None else self.budget.max_context

    def positions(self, layer: int = 0) -> int:
        self.check_open()
        return self.session.positions(layer)

    # One forward pass.

    def begin_forward(self, batch: int, tokens: int, mask: torch.Tensor | None) -> None:
        """Before the first layer on disk: checks the pass against what is there, declares padding.

        Parameters
        ----------
        batch, tokens
            Of the new positions.
        mask
            ``[batch, positions + tokens]`` bool, False where a position is padding; None: none is.

        Raises
        ------
        ValueError
            Another batch than before, a mask of another length, or one by which padding of
            earlier passes would be valid.
        KVSwapError
            When an earlier pass stopped half-way.
        """
        self.check_open()
        if self._cuts:
            raise ValueError(
                "KVSwapCache: keys and values of all layers on disk must be cut together, got "
                f"{len(self._cuts)} of {2 * self.parts.shape.layers}; cache.crop() does it at once"
            )
        positions = self.session.common_positions()
        if positions < 0:
            raise KVSwapError("KVSwapCache: layers are out of step; call reset() and begin again")
        held = self.session.batch()
        if positions and batch != held:
            raise ValueError(
                f"KVSwapCache: batch must stay {held} until reset(), got {batch}; "
                "to repeat sequences use batch_repeat_interleave()"
            )
        longest = self._longest if positions else 0
        refuse_rope_crossing(self.parts, positions, tokens, longest)
        self._longest = max(longest, positions + tokens)
        needed = max(positions + tokens, self._began + self.expected)
        is_outgrown = self._settled and self.redivision.is_outgrown(batch, needed)
        if not self._settled or (is_outgrown and positions == 0):
            self._open_for(FirstPass(batch, max(tokens, self.expected)))
        elif is_outgrown:
            self.redivision.make_room(batch, needed)
        self._held = held
        past, valid = self.padding.declare(positions, batch, tokens, mask)
        if past is not None:
            self._narrowed = True
            self.session.declare_held(past)
        if valid is None and self._declared:
            # A pass that failed declared what it did not append.
            valid = torch.ones(batch, tokens, dtype=torch.bool)
        self._declared = self._declared or valid is not None
        self.session.begin_pass(pass_of(tokens, self.config.selection.max_step_tokens), valid)

    def _open_for(self, first: FirstPass) -> None:
        """With the settings of a text that begins with this pass."""
        self._open(first)
        self.estimates.kinds.clear()  # there is no text: its first long chunk tells more about it
        self.first_pass, self._settled = first, True
        has_guessed = self.budget.kv_memory_bytes is not None and self.budget.max_context is None
        self.redivision.begin(first.context if has_guessed else None)

    def begin_pass(self) -> int:
        """Positions before a pass that is about to begin; `take_back` comes back to this."""
        positions = self._began = self.positions()
        if self.session.common_positions() < 0:
            self.session.begin_pass("decode")  # raises, with the crop that is unfinished
        self.estimates.begin_pass()
        self.padding.begin()
        self._narrowed, self.expected = False, 0
        if self.parts.disk[0] > 0:  # the layer before it looks ahead before begin_forward()
            self._held = self.session.batch()
        return positions

    def take_back(self, positions: int) -> None:
        """A pass has failed: every layer has the first `positions` positions again."""
        if positions == 0:
            self.reset()
            return
        self.session.crop(positions)
        self.padding.take_back()
        if self._narrowed:
            self.session.declare_held(self.padding.between(self.session.batch(), 0, positions))
            self._narrowed = False
        self._declared = False
        self.estimates.take_back()

    def wants_look_ahead(self, layer: int, batch: int, tokens: int) -> Ahead:
        """Whether a look ahead could be of use to `layer`."""
        if not self.config.predicts or self._held != batch:
            return Ahead.NO
        if layer == 0:  # asked by one that is not on disk
            self.session.begin_pass(pass_of(tokens, self.config.selection.max_step_tokens))
        return Ahead(self.session.wants_look_ahead(layer, tokens))

    def look_ahead(self, layer: int, query: torch.Tensor, scale: float, since_ns: int) -> None:
        """query: ``[batch, heads or kv_heads, queries, dim]``, predicted; scale: of products.

        since_ns: when its prediction began, of ``time.monotonic_ns()``.
        """
        self.session.look_ahead(layer, query.contiguous(), scale, since_ns)

    def read_ahead(self, layer: int, tokens: int) -> None:
        """Like `look_ahead`, where any query will do: nothing has to be predicted."""
        self.session.read_ahead(layer, tokens)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        terms: ScoreTerms,
        choice: indexed.Choice | None = None,
        expansion: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new K and V, attends by `ScoreTerms`; ``[batch, tokens, heads, head_dim]``.

        choice: what an index of the model has chosen; None: the session chooses.
        expansion: ``[heads, unrotated + value, rank]`` of a chunk that attends by expanded heads:
        the query is the model's own, and the result ``[batch, tokens, heads, value]``.
        """
        query_, keys, values = _own_types(self.parts, query, keys, values)
        with torch.no_grad(), ExplainedGrowth(self, layer, keys.shape[2]):
            if expansion is not None and self.parts.latent is not None:
                unrotated, weight = self.parts.latent.unrotated, expansion.to(self.parts.dtype)
                arguments = (layer, query_, weight, unrotated, keys)
                output = self.session.extend_expanded(*arguments, *terms)
            elif choice is None:
                output = self.session.extend(layer, query_, keys, values, *terms)
            else:
                self.session.append(layer, keys, values)
                output = indexed.attend(self.session, self.config, layer, query_, terms, choice)
            output = output.to(query.dtype)
        self._stored(layer)
        return NoGradient.apply(output, query) if torch.is_grad_enabled() else output

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores K and V ``[batch, kv_heads, tokens, head_dim]`` that nobody attends over now."""
        with ExplainedGrowth(self, layer, keys.shape[2]):
            self.session.append(layer, _plain(keys), _plain(values))
        self._stored(layer)

    def _stored(self, layer: int) -> None:
        """The pass's positions are in this layer."""
        if layer == 0:
            self.padding.commit()
        if layer == self.parts.shape.layers - 1:
            self._declared = False

    # What is beside the session.

    def bytes_beside(self) -> dict[str, int]:
        """Memory beside the session's, by use: what predicts queries, and a plug-in's."""
        uses = self.need.beside(self.config, self.session.batch(), self.positions())
        return {use: size for use, size in uses.items() if size}

    @property
    def predictor_source(self) -> str:
        """How queries are predicted, or why they are not."""
        calibrated = self._projections is not None
        mode = self.session.facts()["look_ahead"]
        if mode == "trust":
            return self._predictor.description + ("" if calibrated else ", not calibrated")
        return f"{self._predictor.description}, verified" if mode == "verify" else mode

    @property
    def is_calibrated(self) -> bool:
        """Whether projections come from a file."""
        return self._projections is not None

    @property
    def projection_source(self) -> str:
        return "file" if self.is_calibrated else self.estimates.source

    # The whole cache.

    def follow(self, other: SessionDriver) -> None:
        """This one's session is a fork of that one's: its text grows as that would."""
        self.given, self.first_pass = other.given, other.first_pass
        self.redivision.follow(other.redivision)

    def crop_side(self, layer: int, side: str, positions: int) -> None:
        """One layer's keys or values are to be cut; they are once all layers' have been."""
        self.check_open()
        if self._cuts and positions not in self._cuts.values():
            raise ValueError(
                "KVSwapCache: keys and values of all layers on disk must be cut alike, to "
                f"{next(iter(self._cuts.values()))} positions, got {positions}"
            )
        self._cuts[layer, side] = positions
        if len(self._cuts) == 2 * self.parts.shape.layers:
            self._cuts.clear()
            if positions < self.positions():
                self.crop(positions)

    def crop(self, positions: int) -> None:
        self.check_open()
        self.session.crop(positions)
        self.padding.crop(positions)

    def select_sequences(self, indices: Sequence[int]) -> None:
        self.check_open()
        if self.session.batch():
            self.session.select_sequences(list(indices))
            self.padding.select(indices)

    def reset(self) -> None:
        self.check_open()
        self.session.reset()
        self.padding, self._declared = Padding(), False
        self._cuts.clear()
        self.estimates.kinds.clear()  # the next text's first long chunk tells more about it
        self._settled = self._settles_at_once
        self.first_pass = None
        self.redivision.forget()

    def refuse(self) -> None:
        """From here on every use raises `ClosedError`: of a cache that is about to be closed."""
        self.is_open = False

    def close(self) -> None:
        """Frees file and memory. Idempotent."""
        self.refuse()  # the session stays, to raise ClosedError in another thread's pass
        self.session.close()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _own_types(parts: ModelParts, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """As the cache was opened with, where autocast has made other types."""
    device, dtype = parts.device, parts.dtype
    for tensor in tensors:
        if tensor.device == device and tensor.dtype == dtype:
            continue
        if tensor.device != device or not torch.is_autocast_enabled(device.type):
            raise ValueError(
                f"KVSwapCache: {parts.name} must stay {dtype} on {device}, as when the "
                f"cache was opened, got {tensor.dtype} on {tensor.device}; open another cache "
                "after model.to()"
            )
    return [_plain(tensor.to(dtype)) for tensor in tensors]
