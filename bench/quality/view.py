"""What a method sees of one layer when it chooses: queries and all keys, the document's and later.

Samples stand side by side as a batch; all of them follow the same document, whose keys and values
are there once. Column c < T is the document's; column T + j is token j of the sample itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class LayerPast:
    """A document in one layer.

    Parameters
    ----------
    keys, values
        ``[tokens, kv_heads, head_dim]`` in the model's dtype, keys after RoPE.
    first_query
        ``[1, heads, n, head_dim]`` of the first n tokens, those of the first chunk.
    last_query
        ``[1, heads, n, head_dim]`` of the document's last n tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    first_query: torch.Tensor
    last_query: torch.Tensor
    _made: dict[str, torch.Tensor] = field(default_factory=dict)
    _of_heads: dict[int, LayerPast] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.keys)

    def once(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What a method makes of the document once, until `forget`."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def forget(self) -> None:
        self._made.clear()
        self._of_heads.clear()

    def of_head(self, kv_head: int) -> LayerPast:
        """As a model with this KV head alone would have it."""
        if kv_head not in self._of_heads:
            repeats = self.first_query.shape[1] // self.keys.shape[1]
            queries = slice(kv_head * repeats, (kv_head + 1) * repeats)
            own = slice(kv_head, kv_head + 1)
            self._of_heads[kv_head] = LayerPast(
                self.keys[:, own],
                self.values[:, own],
                self.first_query[:, queries],
                self.last_query[:, queries],
            )
        return self._of_heads[kv_head]


@dataclass(frozen=True)
class View:
    """One layer's pass over a batch of samples of n tokens each.

    Parameters
    ----------
    query
        ``[batch, heads, n, head_dim]``: what it attends with.
    predicted
        As `query`: what the layer before tells of it, as the engine predicts it; None for the first
        layer.
    keys, values
        ``[batch, kv_heads, n, head_dim]`` of the samples' own tokens.
    scale
        Of the scores, before the softmax.
    """

    layer: int
    query: torch.Tensor
    predicted: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    past: LayerPast
    scale: float

    @property
    def batch(self) -> int:
        return len(self.query)

    @property
    def rows(self) -> int:
        """Tokens of each sample."""
        return self.query.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def repeats(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.kv_heads

    @property
    def columns(self) -> int:
        """Of the document and a sample together."""
        return self.past.tokens + self.rows

    def of_head(self, kv_head: int) -> View:
        """As a model with this KV head, and the query heads that share it, would have it."""
        queries = slice(kv_head * self.repeats, (kv_head + 1) * self.repeats)
        own = slice(kv_head, kv_head + 1)
        return View(
            self.layer,
            self.query[:, queries],
            None if self.predicted is None else self.predicted[:, queries],
            self.keys[:, own],
            self.values[:, own],
            self.past.of_head(kv_head),
            self.scale,
        )

    def positions(self) -> torch.Tensor:
        """``[n]``: the column of each row's own token."""
        return self.past.tokens + torch.arange(self.rows)

    def causal(self) -> torch.Tensor:
        """``[n, columns]`` bool: what a row may see."""
        return torch.arange(self.columns) <= self.positions()[:, None]

    def own(self) -> torch.Tensor:
        """``[n, columns]`` bool: a row's own token."""
        return torch.arange(self.columns) == self.positions()[:, None]

    def products(
        self, left: torch.Tensor, document: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        """Products of every row with every column.

        Parameters
        ----------
        left
            ``[batch, n, width]`` fp32.
        document
            ``[tokens, width]`` fp32.
        own
            ``[batch, n, width]`` fp32.

        Returns
        -------
        Tensor
            ``[batch, n, columns]`` fp32; columns that a row may not see have a value all the same.
        """
        scores = left.new_empty(*left.shape[:2], self.columns)
        torch.matmul(left, document.T, out=scores[..., : self.past.tokens])
        scores[..., self.past.tokens :] = left @ own.transpose(1, 2)
        return scores

    def masses(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each head's attention weights over all that a row may see.

        Parameters
        ----------
        rows
            ``[count]``: row i of sample b is number b * n + i.

        Yields
        ------
        tuple
            The head, and ``[count, columns]`` fp32.
        """
        sample, row = rows // self.rows, rows % self.rows
        hidden = ~self.causal()[row]
        for head in range(self.query.shape[1]):
            kv_head = head // self.repeats
            query = self.query[sample, head, row].float() * self.scale  # [count, head_dim]
            document = query @ self.past.keys[:, kv_head].float().T
            own = torch.einsum("rd,rnd->rn", query, self.keys[sample, kv_head].float())
            scores = torch.cat([document, own], 1).masked_fill_(hidden, -torch.inf)
            yield head, scores.softmax(1)
