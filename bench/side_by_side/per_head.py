"""Tokens chosen one by one and by each head for itself, as InfiniGen does, on our engine.

Each KV head of each sequence is a sequence of its own with one KV head, in groups of one token: a
session of ``batch * kv_heads`` sequences scores, plans and reads for every head alone. The engine
is the product's; only K, V, queries and outputs are reshaped on their way. A session has one
projection a layer, so heads share theirs, which changes what is chosen but not what it costs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.hf import session as session_module
from kvswap_torch.hf.families import ModelParts, model_parts
from kvswap_torch.hf.settings import Budget
from kvswap_torch.sizing import ModelShape


def one_head(shape: ModelShape) -> ModelShape:
    """What a session sees of the model: a KV head and the query heads that share it."""
    return dataclasses.replace(shape, heads=shape.heads // shape.kv_heads, kv_heads=1)


def session_options(
    parts: ModelParts, config: SwapConfig, path: Path, context: int, batch: int
) -> dict[str, Any]:
    """Of a session whose sequences are heads."""
    heads = dataclasses.replace(parts, shape=one_head(parts.shape))
    budget = Budget(None, context, batch * parts.shape.kv_heads)
    return session_module.session_options(config, heads, path, budget, calibrated=False)


class PerHeadSession:
    """A session of heads, with the calls and shapes of a session of sequences.

    What is not defined here is the inner session's own: counters count heads as sequences.
    """

    def __init__(self, inner: Any, kv_heads: int):
        self._inner, self._kv_heads = inner, kv_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _split(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] -> [batch * kv_heads, heads / kv_heads, ...]."""
        batch, heads, *rest = tensor.shape
        each = heads // self._kv_heads
        return tensor.reshape(batch * self._kv_heads, each, *rest)

    def _joined(self, output: torch.Tensor) -> torch.Tensor:
        """[batch * kv_heads, tokens, each, head_dim] -> [batch, tokens, heads, head_dim]."""
        rows, tokens, each, head_dim = output.shape
        apart = output.view(rows // self._kv_heads, self._kv_heads, tokens, each, head_dim)
        return apart.transpose(1, 2).reshape(apart.shape[0], tokens, -1, head_dim)

    def batch(self) -> int:
        return self._inner.batch() // self._kv_heads

    def declare(self, valid: torch.Tensor) -> None:
        self._inner.declare(valid.repeat_interleave(self._kv_heads, 0))

    def look_ahead(self, layer: int, query: torch.Tensor, scale: float | None = None) -> None:
        self._inner.look_ahead(layer, self._split(query), scale)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._inner.append(layer, self._split(keys), self._split(values))

    def attend(self, layer: int, query, keys, values, scale: float) -> torch.Tensor:
        tensors = map(self._split, (query, keys, values))
        return self._joined(self._inner.attend(layer, *tensors, scale))

    def extend(self, layer: int, query, keys, values, scale: float) -> torch.Tensor:
        tensors = map(self._split, (query, keys, values))
        return self._joined(self._inner.extend(layer, *tensors, scale))


def open_per_head(
    model: Any, config: SwapConfig, path: Path, context: int, batch: int
) -> KVSwapCache:
    """A `KVSwapCache` whose session chooses tokens for each head.

    Parameters
    ----------
    config
        With ``group_tokens=1``. Its rank is of one head's keys, and doubled as for any cache
        without a projection file; projections are set by the caller.
    """
    cache = KVSwapCache(model, path=path, config=config)
    driver = cache.driver
    options = session_options(model_parts(model), driver.config, path, context, batch)
    driver.session.close()
    driver.session = PerHeadSession(
        session_module.open_session(options), driver.parts.shape.kv_heads
    )
    driver.ranks = options["ranks"]
    return cache
