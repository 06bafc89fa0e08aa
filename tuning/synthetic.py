"""A model that decodes from a cache filled with random keys and values: for timing alone.

Timing needs a long context, but not its meaning: filling takes as long as the disk takes to write,
where reading a real text would take the model's prefill. Choices are made and then overridden, so
that a step loads exactly what is to be measured.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.config import SwapConfig

FILL_TOKENS = 2048
PARTS = ("select", "plan", "attend", "append", "wait")
COUNTS = ("groups_attended", "groups_loaded", "reads", "bytes_read")

Override = Callable[[int], Sequence[Sequence[Sequence[int]]]]
"""Step -> for each layer and sequence the groups to attend."""


@dataclass(frozen=True)
class StepTime:
    """One decoding step, all layers.

    Parameters
    ----------
    total
        Seconds of the model's forward pass.
    parts
        Seconds by use, among them ``predict``, of queries of later layers, and ``model``: what
        there is no clock for.
    counts
        Of the session, by name.
    """

    total: float
    parts: dict[str, float]
    counts: dict[str, float]


class SyntheticDecode:
    """An open cache of `context` random tokens. A context manager.

    Parameters
    ----------
    config
        With a projection file for the model.
    room
        Tokens that will be decoded at most.
    """

    def __init__(
        self, model: Any, path: Path, config: SwapConfig, batch: int, context: int, room: int = 256
    ):
        from kvswap_torch.hf.cache import KVSwapCache

        self.model, self.batch = model, batch
        self.cache = KVSwapCache(
            model, path=path, config=config, max_context=context + room, max_batch=batch
        )
        self.layers = self.cache.parts.shape.layers
        self._predict_seconds = 0.0
        self._time_predictions(self.cache._look_ahead)
        try:
            self._fill(context)
        except BaseException:
            self.cache.close()
            raise

    def __enter__(self) -> SyntheticDecode:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.close()

    @property
    def context(self) -> int:
        """Tokens in the cache now."""
        return self.cache.get_seq_length()

    def _time_predictions(self, look_ahead: Any) -> None:
        predict = look_ahead.predict

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            query = predict(*args)
            self._predict_seconds += time.perf_counter() - began
            return query

        look_ahead.predict = timed

    def crop(self, context: int) -> None:
        """Keeps the first `context` tokens."""
        if context < self.context:
            self.cache.crop(context - self.context)

    def _fill(self, context: int) -> None:
        shape, session = self.cache.parts.shape, self.cache.driver.session
        size = (self.batch, shape.kv_heads, min(FILL_TOKENS, context), shape.head_dim)
        noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
        keys = noise.to(self.cache.parts.dtype)
        values = keys.flip(-1)[..., : shape.value_width]
        for layer in range(self.layers):
            for begin in range(0, context, FILL_TOKENS):
                tokens = min(FILL_TOKENS, context - begin)
                session.append(layer, keys[:, :, :tokens], values[:, :, :tokens])

    def steps(self, count: int, override: Override, warm_up: int = 1) -> list[StepTime]:
        """Decodes one token after the other; the first `warm_up` are not reported."""
        with warnings.catch_warnings():
            # Of more tokens than the model was made for: nobody reads an answer here.
            warnings.filterwarnings("ignore", "KVSwapCache: holds", RuntimeWarning)
            return self._steps(count, override, warm_up)[warm_up:]

    def _steps(self, count: int, override: Override, warm_up: int) -> list[StepTime]:
        session = self.cache.driver.session
        times = []
        for step in range(warm_up + count):
            for layer, groups in enumerate(override(step)):
                session.override_selection(layer, groups)
            before, predicted = session.counters(), self._predict_seconds
            began = time.perf_counter()
            self._forward()
            total = time.perf_counter() - began
            after = session.counters()
            parts = {part: after[f"{part}_seconds"] - before[f"{part}_seconds"] for part in PARTS}
            parts["predict"] = self._predict_seconds - predicted
            parts["model"] = total - sum(parts.values())
            counts = {name: after[name] - before[name] for name in COUNTS}
            times.append(StepTime(total, parts, counts))
        return times

    @torch.inference_mode()
    def _forward(self) -> None:
        ids = torch.full((self.batch, 1), 7)
        positions = torch.full_like(ids, self.context)
        named = cache_argument(self.model, self.cache)
        self.model(input_ids=ids, **named, position_ids=positions, use_cache=True)


def median_step(times: Sequence[StepTime]) -> StepTime:
    """The median of each number by itself."""
    return StepTime(
        statistics.median(each.total for each in times),
        {name: statistics.median(each.parts[name] for each in times) for name in times[0].parts},
        {name: statistics.fmean(each.counts[name] for each in times) for name in times[0].counts},
    )
