"""The executable specification of ``heads="each"``, and of whatever options there are."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.python.reference_options import Options
from tests.python.reference_session import ReferenceSession
from tests.selections import Judged


class ReferenceHeads:
    """``heads="each"``: each KV head, with its query heads, has a session of its own."""

    def __init__(self, options: Options):
        own = copy.copy(options)
        own.heads, own.kv_heads = "all", 1
        own.query_heads = options.query_heads // options.kv_heads
        self._of_heads = [ReferenceSession(own) for _ in range(options.kv_heads)]
        keepers = [session._keeper for session in self._of_heads]
        for keeper in keepers:
            keeper.siblings = keepers

    def __getattr__(self, name: str) -> Any:
        """What has one answer for all heads, and what comes in without tensors of heads."""

        def call(*arguments: Any) -> Any:
            return [getattr(one, name)(*arguments) for one in self._of_heads][0]  # noqa: RUF015

        return call

    def _split(self, *tensors: torch.Tensor, dim: int = 1) -> Any:
        """(session, its part of each tensor)"""
        parts = zip(*(tensor.chunk(len(self._of_heads), dim) for tensor in tensors), strict=True)
        return zip(self._of_heads, parts, strict=True)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for session, own in self._split(keys, values):
            session.append(layer, *own)

    def set_projection(self, layer: int, key_projection, query_projection) -> None:
        for session, own in self._split(key_projection, query_projection, dim=0):
            session.set_projection(layer, *own)

    def give_scores(self, layer: int, scores: torch.Tensor) -> None:
        for head, session in enumerate(self._of_heads):
            session.give_scores(layer, scores[head :: len(self._of_heads)])

    def give_worth(self, layer: int, worth: torch.Tensor, decay: torch.Tensor | None) -> None:
        count = len(self._of_heads)
        for head, session in enumerate(self._of_heads):
            lost = None if decay is None else decay[head::count]
            session.give_worth(layer, worth[head::count], lost)

    def look_ahead(
        self, layer: int, query: torch.Tensor, scale: float | None = None, since_ns: int = 0
    ) -> None:
        for session, own in self._split(query):
            session.look_ahead(layer, *own, scale, since_ns)

    def attend(self, layer, query, scale, softcap=0.0, sinks=None) -> torch.Tensor:
        return self._attended("attend", layer, (query,), scale, softcap, sinks)

    def extend(self, layer, query, keys, values, scale, softcap=0.0, sinks=None) -> torch.Tensor:
        return self._attended("extend", layer, (query, keys, values), scale, softcap, sinks)

    def _attended(self, call, layer, tensors, scale, softcap, sinks) -> torch.Tensor:
        parts, count = self._split(*tensors), len(self._of_heads)
        sinks_of = [None] * count if sinks is None else sinks.chunk(count)
        all_parts = zip(parts, sinks_of, strict=True)
        outputs = [
            getattr(s, call)(layer, *own, scale, softcap, sink) for (s, own), sink in all_parts
        ]
        return torch.cat(outputs, 2)

    def read_back(self, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        sides = zip(*(one.read_back(layer, begin, end) for one in self._of_heads), strict=True)
        keys, values = (torch.cat(side, 1) for side in sides)
        return keys, values

    def last_selection(self, layer: int) -> list[list[int]]:
        return self._of_sequences("last_selection", layer)

    def last_judged(self, layer: int) -> list[Judged]:
        return self._of_sequences("last_judged", layer)

    def _of_sequences(self, name: str, layer: int) -> list[Any]:
        of_heads = [getattr(one, name)(layer) for one in self._of_heads]
        return [each for sequence in zip(*of_heads, strict=True) for each in sequence]

    def follow(self, choices: list[list[list[int]]] | None) -> None:
        count = len(self._of_heads)
        for head, session in enumerate(self._of_heads):
            session.follow(choices and [layer[head::count] for layer in choices])

    @property
    def choices(self) -> dict[str, int]:
        of_heads = [one.choices for one in self._of_heads]
        return {name: sum(each[name] for each in of_heads) for name in of_heads[0]}


def reference(options: Options) -> Any:
    """The session that these options specify."""
    return ReferenceHeads(options) if options.heads == "each" else ReferenceSession(options)
