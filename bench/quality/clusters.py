"""Attending clusters of similar keys (DynaKV), emulated beside the full cache.

Who is in which cluster says `csrc/methods/clusters.h` (`engine_clusters.py`); here each row of a
sample chooses among them as it finds them, and then takes in what has left the tail, in the order
of decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from bench.quality.choosing import Frame
from bench.quality.cluster_updates import Row, clusters_of
from bench.quality.co_read import chained
from bench.quality.disk import Want
from bench.quality.view import View
from kvswap_torch.methods.cluster_choice import best_within, cluster_scores
from kvswap_torch.methods.clusters import ClusterOptions

ROOM_TOKENS = 256  # sizes of rows are rounded up to it, so that samples share a document's clusters
CLUSTER_PAGES = 1 << 12  # names of a cluster's pages: more than any has


@dataclass(frozen=True)
class ClusterSettings:
    """How clusters are made and chosen.

    Parameters
    ----------
    options
        Of the clusters; its sinks must be whole groups.
    heads
        ``all`` KV heads share clusters, or ``each`` has its own.
    update
        ``adaptive`` (DynaKV), ``static`` or ``local``.
    score
        See `cluster_scores`.
    tokens_max, pages_max
        That a step may choose of a row: clusters are taken until one does not fit. A cluster that
        alone is larger is attended in part, its newest tokens.
    page_tokens
        Tokens of a page: what is read are whole pages of a cluster.
    order
        Of a document's clusters on disk: ``made``, as k-means numbers them, or ``co_read``, those
        side by side that its last queries choose together.
    """

    options: ClusterOptions
    heads: str
    update: str
    score: str
    tokens_max: int
    pages_max: int
    page_tokens: int
    order: str = "made"


@dataclass
class Chosen:
    """A step's choice.

    Parameters
    ----------
    clusters
        Their numbers, the best first.
    columns
        ``[columns]`` bool: attended, the tail included.
    tokens
        Attended that are in clusters.
    """

    clusters: torch.Tensor
    columns: torch.Tensor
    tokens: int


def choose_clusters(
    row: Row, query: torch.Tensor, kv_heads: int, settings: ClusterSettings, scale: float
) -> Chosen:
    """What one step attends.

    Parameters
    ----------
    query
        ``[heads, head_dim]`` fp32, of the heads that share these clusters.
    """
    count, size = row.count, row.size[: row.count]
    centroid = row.centroid[:count].unflatten(1, (kv_heads, -1))
    scores = cluster_scores(centroid, size, query, settings.score, scale)
    pages = -(-size // settings.page_tokens)
    budgets = torch.tensor([settings.tokens_max, settings.pages_max])
    clusters, is_cut = best_within(scores, torch.stack([size, pages]), budgets)
    is_chosen = torch.zeros(count + 3, dtype=torch.bool)
    is_chosen[:3] = True  # sinks, what is pending, and the tail
    is_chosen[clusters + 3] = True
    columns = is_chosen[row.place + 3]
    tokens = int(size[clusters].sum())
    if is_cut:
        tokens = min(settings.tokens_max, settings.pages_max * settings.page_tokens)
        columns[row.members(int(clusters[0]))[:-tokens]] = False
    return Chosen(clusters, columns, tokens)


class Extents:
    """Where a row's clusters stand on disk: each in neighbouring pages, one free behind it.

    A cluster that outgrows them moves to the end of the file.
    """

    def __init__(self, page_tokens: int):
        self._page_tokens = page_tokens
        self._first: dict[int, int] = {}
        self._room: dict[int, int] = {}
        self._end = 0

    def copy(self) -> Extents:
        other = Extents(self._page_tokens)
        other._first, other._room = dict(self._first), dict(self._room)
        other._end = self._end
        return other

    def want(self, row: Row, clusters: list[int], pages_max: int) -> Want:
        """The pages of these clusters, at most so many of one that is larger."""
        names, places = [], []
        for cluster in sorted(clusters):
            pages = -(-int(row.size[cluster]) // self._page_tokens)
            first = self._place(cluster, pages)
            newest = np.arange(max(0, pages - pages_max), pages)
            names.append(cluster * CLUSTER_PAGES + newest)
            places.append(first + newest)
        empty = [np.zeros(0, dtype=np.int64)]
        return Want(np.concatenate(names or empty), np.concatenate(places or empty))

    def lay(self, row: Row, order: list[int]) -> None:
        """All clusters, in that order of their numbers: after the prompt."""
        for cluster in order:
            self._place(cluster, -(-int(row.size[cluster]) // self._page_tokens))

    def _place(self, cluster: int, pages: int) -> int:
        if pages > self._room.get(cluster, 0):
            self._first[cluster], self._room[cluster] = self._end, pages + 1
            self._end += pages + 1
        return self._first[cluster]


@dataclass
class Taken:
    """What the newest pass over a layer chose: of each sample and row of clusters, step by step."""

    wants: list[list[list[Want]]]
    tokens: list[list[list[int]]]
    clusters: int = 0


@dataclass(frozen=True)
class ClusterMethod:
    """The clusters with the best score, beside sinks, what is pending, and the tail."""

    frame: Frame
    settings: ClusterSettings
    _taken: dict[str, Taken] = field(default_factory=dict)

    @property
    def taken(self) -> Taken:
        """Of the layer that `choose` was called with last."""
        return self._taken["newest"]

    def choose(self, view: View) -> torch.Tensor:
        """``[batch, 1 or kv_heads, n, columns]`` bool."""
        parts = [view]
        if self.settings.heads == "each":
            parts = [view.of_head(head) for head in range(view.kv_heads)]
        taken = Taken([[] for _ in range(view.batch)], [[] for _ in range(view.batch)])
        self._taken["newest"] = taken
        return torch.cat([self._choose_in(part, taken) for part in parts], 1)

    def _choose_in(self, view: View, taken: Taken) -> torch.Tensor:
        mask = torch.zeros(view.batch, 1, view.rows, view.columns, dtype=torch.bool)
        room = -(-view.rows // ROOM_TOKENS) * ROOM_TOKENS
        prompt, extents = view.past.once(f"clusters {room}", lambda: self._prompt(view, room))
        taken.clusters = max(taken.clusters, prompt.count)
        for sample in range(view.batch):
            wants, tokens = self._follow(
                view, sample, (prompt.copy(), extents.copy()), mask[sample, 0]
            )
            taken.wants[sample].append(wants)
            taken.tokens[sample].append(tokens)
        return mask

    def _prompt(self, view: View, room: int) -> tuple[Row, Extents]:
        """The document's clusters, before anything follows it."""
        keys = view.past.keys.flatten(1).float()
        tokens = view.past.tokens + room
        row = clusters_of(self.settings.update, keys.shape[1], tokens, self.settings.options)
        row.enter_prompt(keys, int(self._left(view)[0]))
        extents = Extents(self.settings.page_tokens)
        extents.lay(row, self._order(view, row))
        return row, extents

    def _order(self, view: View, row: Row) -> list[int]:
        if self.settings.order == "made":
            return list(range(row.count))
        queries = view.past.last_query[0].float().unbind(1)  # each [heads, head_dim]
        choose = lambda query: choose_clusters(row, query, view.kv_heads, self.settings, view.scale)  # noqa: E731
        return chained([choose(query).clusters.tolist() for query in queries], row.count)

    def _left(self, view: View) -> torch.Tensor:
        """``[n]``: tokens that have left the tail when each row chooses."""
        return self.frame.sealed(view) * self.frame.group_tokens

    def _follow(
        self, view: View, sample: int, state: tuple[Row, Extents], mask: torch.Tensor
    ) -> tuple[list[Want], list[int]]:
        """One sample, step by step; fills `mask`, ``[n, columns]``."""
        row, extents = state
        past = view.past.keys.flatten(1).float()
        own = view.keys[sample].transpose(0, 1).flatten(1).float()
        keys, left = torch.cat([past, own]), self._left(view).tolist()
        wants, tokens = [], []
        for step in range(view.rows):
            query = view.query[sample, :, step].float()
            chosen = choose_clusters(row, query, view.kv_heads, self.settings, view.scale)
            mask[step] = chosen.columns[: view.columns]
            clusters = chosen.clusters.tolist()
            wants.append(extents.want(row, clusters, self.settings.pages_max))
            tokens.append(chosen.tokens)
            if step + 1 < view.rows and (left[step + 1] > row.left or row.pending):
                row.enter(keys, left[step + 1], set(clusters))
        return wants, tokens
