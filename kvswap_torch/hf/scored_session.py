"""A session whose groups somebody else scores: `kvswap_torch.plug_ins.GroupScores` at work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvswap_torch.chunks import Pass
from kvswap_torch.config import SwapConfig
from kvswap_torch.hf.padding import Padding
from kvswap_torch.hf.session import Session, WrappedSession
from kvswap_torch.plug_ins import GroupScores, check_room, flat_numbers, named, told_bytes

TOLD_ANEW_TOKENS = 1024  # at once, so that little memory is needed beside the budget


class ScoredSession(WrappedSession):
    """A session that asks a plug-in before each choice, and tells it what is sealed.

    Where a call that changes what the plug-in holds ends in an exception, nobody knows what it
    holds: the cache stays as it was before the call, or before the forward pass, or has a crop that
    is unfinished. The next pass begins with a reset of the plug-in and all sealed keys, read back
    from disk.

    Parameters
    ----------
    session
        A `_C.TensorCache` with rows=given.
    plug_in
        Opened for the same settings.
    config
        The session's settings.
    room
        Bytes of the budget that were set aside for the plug-in; None: there is no budget.
    padding
        Says which positions are padding.
    """

    def __init__(
        self,
        session: Session,
        plug_in: GroupScores,
        config: SwapConfig,
        room: int | None,
        padding: Callable[[], Padding],
    ):
        super().__init__(session)
        self._plug_in = plug_in
        self._config = config
        self._room = room
        self._padding = padding
        self._told: dict[int, int] = {}  # tokens of a layer that the plug-in has seen
        self._is_known = True  # what the plug-in holds
        self._pass: Pass = "prefill"  # until it is said

    # What a forward pass calls.

    def begin_pass(self, kind: Pass, valid: torch.Tensor | None = None) -> None:
        self._make_known()
        self._session.begin_pass(kind, valid)
        self._pass = kind

    def look_ahead(
        self, layer: int, query: torch.Tensor, scale: float | None = None, since_ns: int = 0
    ) -> None:
        is_prefill = self._pass == "prefill"
        if not (is_prefill or self._config.is_exact(layer) or self.attends_all(layer)):
            self._give(layer, query, query.shape[-1] ** -0.5 if scale is None else scale)
        self._session.look_ahead(layer, query, scale, since_ns)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._check_room(layer, keys)
        # What the last append left to be sealed is sealed before these come.
        self._tell(layer, *self._sealing(layer, None))
        sealing = self._sealing(layer, keys) if self._pass == "prefill" else None
        self._session.append(layer, keys, values)
        if sealing is not None:
            self._tell(layer, *sealing)

    def attend(self, layer: int, query: torch.Tensor, scale: float, *terms: Any) -> torch.Tensor:
        if self._session.needs_scores(layer, query.shape[2]):
            self._give(layer, query, scale)
        sealing = self._sealing(layer, None)
        output = self._session.attend(layer, query, scale, *terms)
        self._tell(layer, *sealing)
        return output

    def extend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        *terms: Any,
    ) -> torch.Tensor:
        if self._pass == "decode" and not self._config.is_exact(layer):
            self.append(layer, keys, values)
            return self.attend(layer, query, scale, *terms)
        self._check_room(layer, keys)
        sealing = self._sealing(layer, keys)
        output = self._session.extend(layer, query, keys, values, scale, *terms)
        self._tell(layer, *sealing)
        return output

    # The whole cache. The plug-in changes first: it can begin anew, the engine cannot.

    def crop(self, positions: int) -> None:
        left = self._sealed(positions)
        shorter = [layer for layer, told in self._told.items() if told > left]
        with self._changing() as is_known:
            for layer in shorter if is_known else ():
                with torch.no_grad(), named("group_scores", f"truncate of layer {layer}"):
                    self._plug_in.truncate(layer, left)
            self._session.crop(positions)
            self._told.update(dict.fromkeys(shorter, left))

    def select_sequences(self, indices: Sequence[int]) -> None:
        with self._changing() as is_known:
            if is_known:
                with torch.no_grad(), named("group_scores", "select_sequences"):
                    self._plug_in.select_sequences(indices)
            self._session.select_sequences(indices)

    def reset(self) -> None:
        with self._changing():
            self._reset_plug_in()
            self._session.reset()
            self._told.clear()
        self._is_known = True
        self._pass = "prefill"

    # How.

    @contextlib.contextmanager
    def _changing(self) -> Iterator[bool]:
        """Whether it was known before what the plug-in holds; after an exception it is not."""
        before, self._is_known = self._is_known, False
        yield before
        self._is_known = before

    def _make_known(self) -> None:
        """Tells the plug-in all sealed keys anew, if a change of it has failed."""
        if self._is_known:
            return
        self._reset_plug_in()
        group = self._config.selection.group_tokens
        at_once = max(group, TOLD_ANEW_TOKENS // group * group)
        for layer, told in self._told.items():
            for begin in range(0, told, at_once):
                end = min(told, begin + at_once)
                self._seal(layer, end, self.read_back(layer, begin, end)[0])
        self._is_known = True

    def _reset_plug_in(self) -> None:
        with torch.no_grad(), named("group_scores", "reset"):
            self._plug_in.reset()

    def _sealed(self, positions: int) -> int:
        """Of so many positions those that are on disk once they have been attended."""
        group = self._config.selection.group_tokens
        return max(0, positions - self._config.selection.recent_tokens) // group * group

    def _sealing(self, layer: int, keys: torch.Tensor | None) -> tuple[int, torch.Tensor | None]:
        """What of the layer, and of `keys` that are to come, will be sealed: until where, and the
        keys of it that the plug-in has not seen. Asked before: older ones are in memory still."""
        held, told = self.positions(layer), self._told.get(layer, 0)
        end = self._sealed(held + (0 if keys is None else keys.shape[2]))
        if end <= told or self._config.is_exact(layer):
            return told, None
        parts = []
        if held > told:
            parts.append(self.read_back(layer, told, min(end, held))[0])
        if end > held and keys is not None:
            parts.append(keys[:, :, : end - held])
        return end, parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _tell(self, layer: int, end: int, keys: torch.Tensor | None) -> None:
        if keys is not None:
            with self._changing():
                self._seal(layer, end, keys)
                self._told[layer] = end

    def _seal(self, layer: int, end: int, keys: torch.Tensor) -> None:
        valid = self._padding().between(len(keys), end - keys.shape[2], end)
        with torch.no_grad(), named("group_scores", f"seal of layer {layer}"):
            self._plug_in.seal(layer, keys, valid.to(keys.device))

    def _give(self, layer: int, query: torch.Tensor, scale: float) -> None:
        with torch.no_grad(), named("group_scores", f"scores of layer {layer}"):
            scores = self._plug_in.scores(layer, query.clone(), scale)  # its own to change
        batch, _, queries, _ = query.shape
        groups = self._told.get(layer, 0) // self._config.selection.group_tokens
        what = f"group_scores: scores of layer {layer} by {type(self._plug_in).__name__} must be"
        heads = self._plug_in.shape.told_heads
        self._session.give_scores(
            layer, flat_numbers(what, scores, batch, heads, (queries, groups))
        )

    def _check_room(self, layer: int, keys: torch.Tensor) -> None:
        what = f"group_scores: {type(self._plug_in).__name__} must stay"
        tokens = self.positions(layer) + keys.shape[2]
        check_room(
            what, self._room, functools.partial(told_bytes, self._plug_in), len(keys), tokens
        )
