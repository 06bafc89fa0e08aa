"""Caches to compare, filled with random keys and values, and one step of decoding with each."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from bench.full_restore import FullRestoreCache
from bench.kv_file import KvFile
from bench.shapes import Shape
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.hf.families import model_parts

FILL_TOKENS = 2048
SELECTED_TOKENS = 400
WINDOW_TOKENS = 64  # read by the model before the first step, where who is kept depends on queries
ROOM_TOKENS = 512  # decoded at most
# Of the modelled devices (csrc/io/simulated_reader.cpp).
MODELLED_BYTES_PER_SECOND = {"nvme": 1.8e9, "ufs": 2.9e9, "emmc": 0.25e9}

Take = Callable[[int, torch.Tensor, torch.Tensor], None]


def chunks(
    shape: Shape, batch: int, context: int, layer: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A layer's keys and values, ``[batch, kv_heads, tokens, width]`` bf16 each, in order.

    Normal numbers, drawn once for a chunk and given other signs in each channel of each chunk: no
    two tokens are alike, and gigabytes of them take seconds.
    """
    generator = torch.Generator().manual_seed(1_000_003 * layer)
    size = (batch, shape.kv_heads, min(FILL_TOKENS, context), shape.head_dim)
    drawn = torch.randn(size, generator=generator, dtype=torch.float32).bfloat16()
    for begin in range(0, context, FILL_TOKENS):
        signs = torch.randint(2, (*size[:2], 1, size[3]), generator=generator).mul_(2).sub_(1)
        keys = drawn[:, :, : context - begin] * signs.to(drawn.dtype)
        yield (keys, keys.flip(-1)) if shape.latent is None else shape.latent.split(keys)


def fill(shape: Shape, batch: int, context: int, take: Take) -> None:
    """Calls take(layer, keys, values) with every layer's tokens, a chunk at a time."""
    for layer in range(shape.layers):
        for keys, values in chunks(shape, batch, context, layer):
            take(layer, keys, values)


class Contender:
    """One cache that decodes token by token; `seconds` has one number a step."""

    def __init__(self, model: Any, cache: Any, batch: int, context: int):
        self.model, self.cache = model, cache
        self.ids = torch.full((batch, 1), 7)
        self.position = context
        self.seconds: list[float] = []
        self.before_step: Callable[[int], None] = lambda step: None

    @torch.inference_mode()
    def step(self) -> None:
        self.before_step(len(self.seconds))
        positions = torch.full_like(self.ids, self.position)
        began = time.perf_counter()
        output = self.model(
            input_ids=self.ids, past_key_values=self.cache, position_ids=positions, use_cache=True
        )
        self.seconds.append(time.perf_counter() - began)
        self.ids = output.logits[:, -1:].argmax(-1)
        self.position += 1

    def close(self) -> None:
        if hasattr(self.cache, "close"):
            self.cache.close()
        self.cache = None
        gc.collect()


def set_random_projections(session: Any, layers: Iterable[int], width: int, rank: int) -> None:
    """Orthonormal columns, ``[width, rank]``, the same for every one of these layers."""
    basis = torch.linalg.qr(torch.randn(width, rank, generator=torch.Generator().manual_seed(1)))[0]
    for layer in layers:
        session.set_projection(layer, basis, basis)


def open_kvswap(
    model: Any,
    shape: Shape,
    batch: int,
    context: int,
    path: Path,
    config: SwapConfig | None,
    kv_memory_bytes: int | None = None,
) -> Contender:
    """`config.rank` is doubled, as for every cache that has no projection file."""
    cache = KVSwapCache(
        model,
        path=path,
        config=config,
        kv_memory_bytes=kv_memory_bytes,
        max_context=context + ROOM_TOKENS,
        max_batch=batch,
    )
    width = shape.kv_heads * shape.head_dim
    set_random_projections(cache.driver.session, range(shape.layers), width, cache.driver.ranks[0])
    fill(shape, batch, context, appending(cache))
    return Contender(model, cache, batch, context)


def appending(cache: KVSwapCache) -> Take:
    """Into its session, what the model caches."""
    session, parts = cache.driver.session, cache.driver.parts
    return lambda layer, keys, values: session.append(layer, *parts.stored(keys, values))


def open_preset(
    name: str, model: Any, shape: Shape, batch: int, context: int, path: Path, device: str | None
) -> Contender:
    """By the preset's own settings, in the memory that they take.

    Where it keeps tokens, the model reads the newest `WINDOW_TOKENS`: who is kept follows from
    their attention.
    """
    parts = model_parts(model)
    config = SwapConfig.preset(name, shape=parts.preset_shape(), model=parts.identity)
    config = config.with_settings({"storage.simulated_device": device})
    most = {"max_context": context + ROOM_TOKENS, "max_batch": batch}
    cache = KVSwapCache(model, path=path, config=config, **most)
    session = cache.driver.session
    if config.retention is None:
        if config.takes_projections:
            chosen = [layer for layer in range(shape.layers) if not config.is_exact(layer)]
            width = shape.kv_heads * shape.head_dim
            set_random_projections(session, chosen, width, cache.driver.ranks[0])
        fill(shape, batch, context, appending(cache))
    else:
        fill(shape, batch, context - WINDOW_TOKENS, appending(cache))
        positions = torch.arange(context - WINDOW_TOKENS, context).expand(batch, -1)
        call = {"past_key_values": cache, "position_ids": positions, "use_cache": True}
        with torch.inference_mode():
            model(input_ids=positions % 4096, **call)
    return Contender(model, cache, batch, context)


def whole_layer(
    shape: Shape, batch: int, context: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its `chunks` as one, for a cache that would copy all it has with each of them."""
    size = (batch, shape.kv_heads, context)
    keys, values = (
        torch.empty((*size, width), dtype=torch.bfloat16) for width in shape.cached_widths
    )
    begin = 0
    for new_keys, new_values in chunks(shape, batch, context, layer):
        end = begin + new_keys.shape[2]
        keys[:, :, begin:end], values[:, :, begin:end] = new_keys, new_values
        begin = end
    return keys, values


def open_dynamic(model: Any, shape: Shape, batch: int, context: int) -> Contender:
    cache = DynamicCache(config=model.config)
    for layer in range(shape.layers):
        keys, values = whole_layer(shape, batch, context, layer)
        cache.layers[layer].lazy_initialization(keys, values)
        cache.layers[layer].keys, cache.layers[layer].values = keys, values
    return Contender(model, cache, batch, context)


def open_static(model: Any, shape: Shape, batch: int, context: int) -> Contender:
    cache = StaticCache(config=model.config, max_cache_len=context + ROOM_TOKENS)
    fill(shape, batch, context, lambda layer, k, v: cache.update(k, v, layer))
    return Contender(model, cache, batch, context)


def fill_file(file: KvFile, shape: Shape, batch: int) -> None:
    """Writes every layer's tokens."""
    for layer in range(shape.layers):
        begin = 0
        for keys, values in chunks(shape, batch, file.context, layer):
            file.write(layer, begin, keys, values)
            begin += keys.shape[2]
    file.flush()


def kv_file_size(shape: Shape, batch: int, context: int) -> tuple[int, ...]:
    return (batch, shape.kv_heads, context, *shape.cached_widths)


def open_restore(
    model: Any, shape: Shape, batch: int, context: int, file: KvFile, device: str | None
) -> Contender:
    """Reads what `file` was filled with."""
    bandwidth = MODELLED_BYTES_PER_SECOND[device] if device else None
    return Contender(model, FullRestoreCache(file, bandwidth), batch, context)


def open_floor(model: Any, shape: Shape, batch: int) -> Contender:
    """The model's own work: a context of as many tokens as are selected."""
    return open_dynamic(model, shape, batch, SELECTED_TOKENS)


CLOCKS = ("select", "plan", "wait", "attend", "append")


class TokenClock:
    """Where the milliseconds of a `KVSwapCache`'s tokens go, since this was made or restarted.

    The session's own clocks, predicting queries, which happens outside the session, and the rest,
    which is the model's.
    """

    def __init__(self, cache: KVSwapCache):
        self._cache = cache
        self.restart()
        predict = cache._look_ahead.predict

        def timed(*args):
            began = time.perf_counter()
            query = predict(*args)
            self._predict_seconds += time.perf_counter() - began
            return query

        cache._look_ahead.predict = timed

    def restart(self) -> None:
        self._predict_seconds = 0.0
        self._began = self._counters()

    def grown(self) -> dict[str, float]:
        """The session's counters, by how much they have grown."""
        return {name: value - self._began[name] for name, value in self._counters().items()}

    def _counters(self) -> dict[str, float]:
        return dict(self._cache.driver.session.counters())

    def milliseconds(self, seconds: list[float]) -> dict[str, float]:
        """Of one token each, when these are the times of all steps since."""
        grown, steps = self.grown(), len(seconds)
        parts = {name: 1e3 * grown[f"{name}_seconds"] / steps for name in CLOCKS}
        parts["predict"] = 1e3 * self._predict_seconds / steps
        parts["model"] = 1e3 * statistics.mean(seconds) - sum(parts.values())
        return {name: round(value, 3) for name, value in parts.items()}
