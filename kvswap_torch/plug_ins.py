"""Your own way to choose, in plain torch: what groups are worth, or which tokens stay.

A plug-in returns numbers, never ids. The engine keeps ties, sinks, padding, the budget, the union
over queries and what is in memory, so that a plug-in can choose badly but breaks no promise.

>>> class NewestFirst(GroupRows):
...     '''Attends the newest groups.'''
...
...     def rows(self, layer, keys, valid):  # one number a group: how many came before it
...         count = keys.shape[2] // self.shape.group_tokens
...         first = self.groups(layer)
...         places = torch.arange(first, first + count, dtype=torch.float32)
...         return places.expand(len(keys), 1, count)[..., None]
...
...     def scores_of(self, layer, query, rows, scale):
...         return rows[:, 0, None, :, 0].expand(-1, query.shape[2], -1)

>>> cache = KVSwapCache(model, path="/fast/disk", group_scores=NewestFirst())  # doctest: +SKIP
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvswap_torch.errors import BudgetError
from kvswap_torch.memory_size import format_bytes

__all__ = ["CacheShape", "GroupRows", "GroupScores", "TokenScores", "Worth"]


@dataclass(frozen=True)
class CacheShape:
    """What a plug-in is used for.

    Attributes
    ----------
    layers
        On disk; a plug-in's `layer` counts them from 0.
    exact_layers
        Of them, those that attend everything: nothing is asked or told of them.
    heads, kv_heads, head_dim
        Of the model.
    group_tokens
        Tokens of a group.
    heads_apart
        Whether each KV head chooses for itself (``heads="each"``).
    dtype, device
        Of keys and queries.
    """

    layers: int
    exact_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    group_tokens: int
    heads_apart: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def told_heads(self) -> tuple[int, ...]:
        """Of what a plug-in tells, the dimension of heads, where there is one."""
        return (self.kv_heads,) if self.heads_apart else ()


class GroupScores(ABC):
    """Who is read: what each group is worth to a query. For ``KVSwapCache(group_scores=...)``.

    An object serves one cache at a time, from one thread. What it raises ends the forward pass,
    which is taken back, or the crop or choice of sequences, which is then not made; the cache goes
    on. Unless it was `scores` that raised, the next pass begins with `reset`, and `seal` of all
    that is sealed, read back from disk as it is stored there.
    """

    shape: CacheShape

    def open(self, shape: CacheShape) -> None:
        """A cache is opened with it: it holds nothing."""
        self.shape = shape
        self.reset()

    @abstractmethod
    def seal(self, layer: int, keys: torch.Tensor, valid: torch.Tensor) -> None:
        """The layer's next groups are on disk.

        Parameters
        ----------
        keys
            ``[batch, kv_heads, tokens, head_dim]`` after RoPE, whole groups, not to be kept: they
            may be a view of the model's own.
        valid
            ``[batch, tokens]`` bool: False is padding.
        """

    @abstractmethod
    def scores(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """What all sealed groups of the layer are worth; the best of them are attended.

        Parameters
        ----------
        query
            ``[batch, heads, queries, head_dim]`` after RoPE; predicted, where the cache looks
            ahead.
        scale
            Of the products in attention.

        Returns
        -------
        Tensor
            ``[batch, queries, groups]`` of any floating dtype, with ``heads="each"`` ``[batch,
            kv_heads, queries, groups]``. -inf: never.
        """

    @abstractmethod
    def truncate(self, layer: int, tokens: int) -> None:
        """The layer has the first `tokens` sealed tokens, whole groups, and no more."""

    @abstractmethod
    def select_sequences(self, indices: Sequence[int]) -> None:
        """Sequence i goes on as sequence ``indices[i]``: beams, repeats, another batch."""

    @abstractmethod
    def reset(self) -> None:
        """Nothing is on disk any more."""

    @abstractmethod
    def nbytes(self, batch: int, tokens: int) -> int:
        """Bytes that it keeps of so many sequences of `tokens`, in all layers: of the budget."""


@dataclass(frozen=True)
class Worth:
    """What tokens are worth to be kept: those of a pass, or after a step all.

    Attributes
    ----------
    now
        ``[batch, tokens]`` of any floating dtype, with ``heads="each"`` ``[batch, kv_heads,
        tokens]``. Those with most stay, the earlier first among equals; -inf: never.
    decay
        As `now`: what a token loses of it with each later one; None: nothing. The logarithm of
        a retention b^t is ``decay = -log(b)``.
    """

    now: torch.Tensor
    decay: torch.Tensor | None = None


class TokenScores(ABC):
    """Who is kept: what each token is worth. For ``KVSwapCache(token_scores=...)``.

    The config says how many stay (``keeper="given"``, `keep_tokens`) and how often they are chosen
    anew: after each prompt, and every `keep_interval` tokens. With ``rows="none"`` they alone are
    attended, beside sinks and tail; with other rows groups are read beside them.

    An object may serve several caches, each from one thread at a time. What it raises ends the
    forward pass, which is taken back; the cache goes on.
    """

    shape: CacheShape
    notes = 0
    """Numbers, fp32, that `attended` may note of each token and KV head: of the budget, twice."""

    def open(self, shape: CacheShape) -> None:
        """A cache is opened with it."""
        self.shape = shape

    def attended(self, layer: int, weights: torch.Tensor, notes: torch.Tensor) -> Worth | None:
        """What all tokens are worth, now that a step has attended; None: what they were.

        Where a class has one of its own it is called after each decoding step, `worth` of the
        step's tokens first, for each layer that retains tokens. Others cost nothing: no weights
        are computed.

        Parameters
        ----------
        weights
            ``[batch, kv_heads, tokens]`` fp32 of the host, all tokens so far in order of position:
            the share of the step's attention that each received, the mean over the queries of the
            step and the query heads of the KV head. 0 where a token was not attended: it was
            evicted or not selected, or it is padding. Queries that are padding count too: those of
            a short prompt in a batch that is padded.
        notes
            ``[batch, kv_heads, tokens, self.notes]`` fp32 of the host, to be written in place: what
            the last step left there, 0 of tokens that came since. The cache crops, reorders and
            resets them with the text. A step that is taken back has noted nothing. What earlier
            steps noted of older tokens, and the worth of these, no crop takes back.

        Returns
        -------
        Worth
            Of all tokens, in the place of what was said of them; `decay` counts from here on.
        """
        return None

    @abstractmethod
    def worth(
        self, layer: int, query: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> Worth:
        """What the tokens of one pass are worth in a layer.

        Parameters
        ----------
        query
            ``[batch, heads, tokens, head_dim]`` after RoPE; None where keys and values came
            without (`KVSwapCache.from_cache`).
        keys, values
            ``[batch, kv_heads, tokens, head_dim]``, keys after RoPE; values may be narrower.
        """


class GroupRows(GroupScores):
    """`GroupScores` that keep one row of numbers for each group and KV head.

    Subclasses say what a row is (`rows`), how wide (`width`), and what it is worth (`scores_of`).
    """

    width = 1
    """Numbers of a row, fp32."""
    _rows: list[list[torch.Tensor]]  # [layers][parts]

    @abstractmethod
    def rows(self, layer: int, keys: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """``[batch, kv_heads or 1, groups, width]`` of newly sealed keys, as `seal` has them."""

    @abstractmethod
    def scores_of(
        self, layer: int, query: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `scores`; rows: ``[batch, kv_heads or 1, groups, width]`` fp32, of all groups."""

    def groups(self, layer: int) -> int:
        """Groups sealed so far."""
        return sum(part.shape[2] for part in self._rows[layer])

    def seal(self, layer: int, keys: torch.Tensor, valid: torch.Tensor) -> None:
        self._rows[layer].append(self.rows(layer, keys, valid).float())

    def scores(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        return self.scores_of(layer, query, self._joined(layer), scale)

    def _joined(self, layer: int) -> torch.Tensor:
        parts = self._rows[layer]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts, 2)]
        return parts[0]

    def truncate(self, layer: int, tokens: int) -> None:
        if self._rows[layer]:
            groups = tokens // self.shape.group_tokens
            self._rows[layer] = [self._joined(layer)[:, :, :groups].clone()]

    def select_sequences(self, indices: Sequence[int]) -> None:
        chosen = torch.as_tensor(indices, dtype=torch.long, device=self.shape.device)
        self._rows = [[part[chosen] for part in parts] for parts in self._rows]

    def reset(self) -> None:
        self._rows = [[] for _ in range(self.shape.layers)]

    def nbytes(self, batch: int, tokens: int) -> int:
        layers = self.shape.layers - len(self.shape.exact_layers)
        heads = self.shape.kv_heads
        return 4 * layers * batch * heads * (tokens // self.shape.group_tokens) * self.width


def told_bytes(plug_in: GroupScores, batch: int, tokens: int) -> int:
    """What it says it keeps, checked."""
    told = plug_in.nbytes(batch, tokens)
    if not isinstance(told, int) or isinstance(told, bool) or told < 0:
        raise ValueError(
            f"group_scores: nbytes({batch}, {tokens}) of {type(plug_in).__name__} must be an int "
            f"of at least 0, got {told!r}"
        )
    return told


def sees_attention(plug_in: TokenScores | None) -> bool:
    """Whether it has an `attended` of its own."""
    return plug_in is not None and type(plug_in).attended is not TokenScores.attended


def notes_bytes(plug_in: TokenScores | None, batch: int, tokens: int) -> int:
    """Of what `attended` is given: notes, those before the newest step, a layer's own, weights.

    Raises
    ------
    ValueError
        `notes` is no number of numbers.
    """
    if plug_in is None or not sees_attention(plug_in):
        return 0
    width, shape = plug_in.notes, plug_in.shape
    if not isinstance(width, int) or isinstance(width, bool) or width < 0:
        raise ValueError(
            f"token_scores: notes of {type(plug_in).__name__} must be an int of at least 0, got "
            f"{width!r}"
        )
    layers = shape.layers - len(shape.exact_layers)
    return 4 * batch * shape.kv_heads * tokens * ((2 * layers + 1) * width + 1)


def check_room(
    what: str, room: int | None, need: Callable[[int, int], int], batch: int, tokens: int
) -> None:
    """Whether what a plug-in keeps of so many sequences is within what was set aside for it.

    Parameters
    ----------
    what
        Begins the sentence, up to its verb.
    room
        Bytes of the budget; None: there is no budget.
    need
        Bytes that it keeps of (sequences, tokens of each).

    Raises
    ------
    BudgetError
        It is not.
    """
    if room is None:
        return
    taken = need(batch, tokens)
    if taken > room:
        raise BudgetError(
            f"{what} within the {format_bytes(room)} set aside for it, got {format_bytes(taken)} "
            f"for {batch} sequences of {tokens} tokens; open the cache with max_context and "
            "max_batch, so that its budget is divided for them"
        )


def flat_numbers(
    what: str, told: object, batch: int, heads: tuple[int, ...], rest: tuple[int, ...]
) -> torch.Tensor:
    """What a plug-in told, ``[batch * heads, *rest]`` fp32 of the host.

    Raises
    ------
    ValueError
        `told` is no tensor ``[batch, *heads, *rest]`` of floating numbers; `what` begins the
        sentence.
    """
    wanted = (batch, *heads, *rest)
    tensor = told if isinstance(told, torch.Tensor) and not told.is_meta else None
    if tensor is None or not tensor.is_floating_point() or tuple(tensor.shape) != wanted:
        came = repr(told) if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{what} a tensor {list(wanted)} of floating numbers, got {came}")
    return tensor.detach().float().cpu().flatten(0, len(heads))


class named:
    """Says of an exception where in a plug-in it came from."""

    def __init__(self, plug_in: str, where: str):
        self._plug_in, self._where = plug_in, where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(f"KVSwapCache: raised by {self._plug_in}, in {self._where}")
