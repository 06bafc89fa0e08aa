"""Indexed attention (DSA): the model itself says which tokens each query attends.

DeepSeek V3.2 (arXiv:2512.02556, 2.1) and its kin score all tokens by small keys of an index, and
attend the best few thousand of them. Those keys stay in memory. Of the latents on disk a decoding
step reads the groups that have a chosen token, and sees in them the chosen tokens alone: what the
model itself attends, at any length. A longer chunk chooses anew for every query, so that it
attends all of the past as it streams through, each query its own part of it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from kvswap_torch.config import Summary, SwapConfig
from kvswap_torch.errors import BudgetError, ConfigError, UnsupportedModelError
from kvswap_torch.hf.layer import DiskLayer, from_elsewhere, refuse_options
from kvswap_torch.hf.session import ScoreTerms, Session

if TYPE_CHECKING:
    from kvswap_torch.hf.driver import SessionDriver
    from kvswap_torch.hf.families import ModelParts

BLOCK_TOKENS = 2048  # of the past that are attended at a time
SCORES_MAX = 1 << 23  # fp32 numbers of one product: 32 MiB


class IndexedLayer(DiskLayer):
    """A layer on disk whose attention gets a list of the tokens that it attends.

    Beside `DiskLayer`'s calls the attention module calls `update_indexer` between `update` and
    `attend`, where the layer has an index of its own: some take what an earlier layer chose.
    """

    def __init__(self, driver: SessionDriver, disk_index: int):
        super().__init__(driver, disk_index)
        self.index_keys = DynamicLayer()  # ``[batch, 1, tokens, index width]``, and no values

    def update_indexer(self, index_keys: torch.Tensor) -> torch.Tensor:
        """Keeps the new tokens' keys of the index, ``[batch, tokens, width]``; returns all."""
        self.driver.check_open()
        if not self.has_pending:
            raise ValueError(from_elsewhere(self.driver.parts))
        return self.keep_index(index_keys)

    def keep_index(self, index_keys: torch.Tensor) -> torch.Tensor:
        """As `update_indexer`, of tokens that come from another cache."""
        keys = index_keys.detach().unsqueeze(1)
        kept, _ = self.index_keys.update(keys, keys[..., :0])
        return kept.squeeze(1)

    def check_index(self, attention: nn.Module, batch: int, tokens: int) -> None:
        """That keys of the index that come from a saved cache may be this layer's.

        Raises
        ------
        ValueError
            There are none of a layer that chooses, or those of other tokens.
        """
        has_own = getattr(attention, "indexer", None) is not None
        must = [batch, 1, tokens] if has_own else None
        keys = self.index_keys
        found = list(keys.keys.shape[:3]) if keys.is_initialized else None
        if found != must:
            raise ValueError(f"a layer's index must have keys of {must}, got {found}")

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        indices: torch.Tensor | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends over the tokens `indices` ``[batch, tokens, chosen]``, as far as the mask allows.

        attention_mask: ``[batch, 1, tokens, positions]`` bool, causal and without padding.
        """
        keys, values = self._take_pending(module)
        refuse_options(module, None, dropout, kwargs)
        refuse_terms(module, kwargs)
        check_choice(module, attention_mask, indices)
        parts = self.driver.parts
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        asked = parts.asked(module, query)
        terms = ScoreTerms(scale, sinks=self._plain_sinks(s_aux))
        choice = Choice(attention_mask[:, 0], indices.long())
        stored = parts.stored(keys, values)
        output = self.driver.attend(self.disk_index, asked, *stored, terms, choice)
        return parts.answered(module, output)


class Choice:
    """Which positions each query of a pass attends.

    Parameters
    ----------
    allowed
        ``[batch, queries, positions]`` bool.
    indices
        ``[batch, queries, chosen]``: positions; what is not allowed does not count.
    """

    def __init__(self, allowed: torch.Tensor, indices: torch.Tensor):
        self._allowed, self._indices = allowed, indices

    @property
    def queries(self) -> int:
        return self._indices.shape[1]

    def positions(self) -> list[list[int]]:
        """Of the only query, of each sequence, rising."""
        counts = self._allowed[:, 0].gather(1, self._indices[:, 0])
        pairs = zip(self._indices[:, 0], counts, strict=True)
        return [own[has].sort().values.tolist() for own, has in pairs]

    def all(self) -> torch.Tensor:
        """``[batch, queries, positions]`` bool."""
        chosen = torch.zeros_like(self._allowed).scatter_(-1, self._indices, True)
        return chosen & self._allowed


def check_choice(
    module: nn.Module, mask: torch.Tensor | None, indices: torch.Tensor | None
) -> None:
    """The attention function must be given both, or another choice would be made in silence."""
    name = type(module).__name__
    if indices is None:
        raise UnsupportedModelError(
            f"KVSwapCache: {name} must say which tokens it attends (indices), and did not"
        )
    if mask is None or mask.dim() != 4 or mask.dtype != torch.bool:
        found = "none" if mask is None else f"{list(mask.shape)} of {mask.dtype}"
        raise UnsupportedModelError(
            f"KVSwapCache: {name} must attend by a mask [batch, 1, tokens, positions] of bools, "
            f"got {found}"
        )


def refuse_terms(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """What attention over chosen tokens does not do must not be ignored."""
    for name in ("softcap", "sliding_window"):
        if kwargs.get(name):
            raise UnsupportedModelError(
                f"KVSwapCache: {type(module).__name__} uses {name}, which attention over what "
                "an index has chosen has not"
            )


def group_scores(positions: list[list[int]], groups: int, config: SwapConfig) -> torch.Tensor:
    """``[batch, 1, groups]``: 0 for groups that have one of the positions, -inf for the others.

    Raises
    ------
    BudgetError
        A sequence's are more than a step may read.
    """
    scores = torch.full((len(positions), 1, groups), -torch.inf)
    most, size = config.selection.top_k_groups, config.selection.group_tokens
    for sequence, own in enumerate(positions):
        touched = {position // size for position in own if position < groups * size}
        if len(touched) > most:
            raise BudgetError(
                f"KVSwapCache: selection.top_k_groups must be at least the {len(touched)} groups "
                f"that hold what the model's index has chosen, got {most}; give the cache a larger "
                "kv_memory_bytes, or open it without a config"
            )
        scores[sequence, 0, list(touched)] = 0.0
    return scores


def attend(
    session: Session,
    config: SwapConfig,
    layer: int,
    query: torch.Tensor,
    terms: ScoreTerms,
    choice: Choice,
) -> torch.Tensor:
    """Attends over the chosen of the positions that the layer holds, the newest included.

    Arguments and result as of `attend_streamed`.
    """
    if choice.queries > 1:
        return attend_streamed(session, layer, query, terms, choice.all())
    positions = choice.positions()
    if session.needs_scores(layer, 1):
        before = session.positions(layer) - 1  # of which the oldest are sealed
        left = max(0, before - config.selection.recent_tokens)
        groups = left // config.selection.group_tokens
        session.give_scores(layer, group_scores(positions, groups, config))
    session.give_tokens(layer, positions)
    return session.attend(layer, query, *terms)


def attend_streamed(
    session: Session, layer: int, query: torch.Tensor, terms: ScoreTerms, chosen: torch.Tensor
) -> torch.Tensor:
    """Exact attention over the chosen positions, of all that the layer holds.

    Parameters
    ----------
    query
        ``[batch, heads, queries, head_dim]`` over one KV head.
    chosen
        ``[batch, queries, positions]`` bool. A query without any gets zeros.

    Returns
    -------
    Tensor
        ``[batch, queries, heads, head_dim]``, of the query's dtype.
    """
    batch, heads, queries, width = query.shape
    output = torch.zeros(batch, heads, queries, width, device=query.device)
    largest = torch.full((batch, heads, queries, 1), -torch.inf, device=query.device)
    total = torch.zeros_like(largest)
    rows = max(1, SCORES_MAX // (batch * heads * BLOCK_TOKENS))
    for begin in range(0, chosen.shape[2], BLOCK_TOKENS):
        part = chosen[:, None, :, begin : begin + BLOCK_TOKENS]
        if not part.any():
            continue
        keys = session.read_back(layer, begin, begin + part.shape[3])[0].float()
        for first in range(0, queries, rows):
            own = slice(first, first + rows)
            scores = query[:, :, own].float() @ keys.transpose(2, 3) * terms.scale
            scores = scores.masked_fill(~part[:, :, own], -torch.inf)
            now = torch.maximum(largest[:, :, own], scores.amax(-1, keepdim=True))
            base = now.nan_to_num(neginf=0.0)  # of a query that has seen nothing yet
            weights = (scores - base).exp()
            before = (largest[:, :, own] - base).exp()
            output[:, :, own] = output[:, :, own] * before + weights @ keys
            total[:, :, own] = total[:, :, own] * before + weights.sum(-1, keepdim=True)
            largest[:, :, own] = now
    if terms.sinks is not None:  # a score beside the tokens', without a value
        sinks = terms.sinks.float().view(1, heads, 1, 1).to(query.device)
        total = total + (sinks - largest.nan_to_num(neginf=0.0)).exp()
    return (output / total.clamp_min(1e-30)).to(query.dtype).transpose(1, 2)


def settings_of_index(config: SwapConfig | None, parts: ModelParts, context: int | None):
    """A config under which a step reads what the model's index chooses.

    What chooses groups (summary, score, prefetch) is the index's in the place of the config's.

    Raises
    ------
    ConfigError
        The config keeps or attends what the index has not chosen.
    """
    base = config or SwapConfig()
    why = f"since the index of {parts.name} says which tokens are attended"
    for name, is_set in (
        ("retention", base.retention is not None),
        ("clusters", base.clusters is not None),
        ("selection.dense_layers", bool(base.selection.dense_layers)),
        ("solutions", bool(base.solutions)),
    ):
        if is_set:
            raise ConfigError(f"{name}: must be left out, {why}")
    if base.selection.heads != "joint":
        raise ConfigError(f"selection.heads: must be joint, {why}")
    most = parts.index_topk
    if context is not None:
        most = min(most, -(-context // base.selection.group_tokens))
    groups = max(most, base.selection.top_k_groups)
    return SwapConfig(
        selection={
            "group_tokens": base.selection.group_tokens,
            "recent_tokens": base.selection.recent_tokens,
            "sink_tokens": base.selection.sink_tokens,
            "top_k_groups": groups,
            "max_step_tokens": 1,
        },
        summary=Summary(kind="user"),
        prefetch={"mode": "off"},
        memory=dataclasses.replace(
            base.memory, pages_per_layer=max(groups, base.memory.pages_per_layer)
        ),
        storage=base.storage,
    )
