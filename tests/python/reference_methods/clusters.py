"""DynaKV: clusters of similar keys that grow, and split while decoding (4.1, 4.2, Algorithm 1).

Which tokens stand in which cluster, for one row: a sequence, or one KV head of it. Plain torch: the
reference of `csrc/methods/clusters/adaptive_clusters.h`. What
the paper leaves open is said where it is decided.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container
from dataclasses import dataclass

import torch

from tests.python.reference_methods.k_means import (
    comparable,
    k_means,
    mean_variance,
    split_in_two,
    squares,
)

THRESHOLD_TOKENS = 512  # clustered before what is too wide is decided
CLUSTERS_SHARE = 1.25  # of tokens / cluster_tokens: what splits may come to
SINK, PENDING, TAIL = -3, -2, -1  # where a token is that is in no cluster
UPDATES = ("adaptive", "static", "local")
LOCAL_CLUSTERS = 4  # made at once of later tokens


@dataclass(frozen=True)
class ClusterOptions:
    """What a row's clusters obey.

    Parameters
    ----------
    cluster_tokens
        Tokens of a cluster that k-means aims at.
    cluster_tokens_max
        That no cluster exceeds.
    split_factor
        A cluster is too wide when its variance exceeds so many times the mean of its row.
    pending_tokens
        That wait in memory for their cluster to be read; with so many, one is read for them.
    sink_tokens
        First tokens of the row, which never enter a cluster.
    block_tokens
        Of a prompt, clustered by themselves: the cost is then linear in its length. Where fewer
        than two clusters' come at once they are entered token by token.
    update
        How later tokens enter (figure 1). ``adaptive``: they join the nearest cluster, which is
        split where it gets too wide or too large. ``static``: they join the nearest that has room,
        whose centroid stays; where none has room a cluster is opened, and nothing is ever split.
        ``local``: they wait until they fill `LOCAL_CLUSTERS` clusters, and are clustered among
        themselves; what has no distance waits in none of these.
    """

    cluster_tokens: int = 32
    cluster_tokens_max: int = 64
    split_factor: float = 1.25
    pending_tokens: int = 16
    sink_tokens: int = 0
    block_tokens: int = 8192
    update: str = "adaptive"

    @property
    def waiting_max(self) -> int:
        """Tokens that wait at most at the end of a step."""
        if self.update == "local":
            return LOCAL_CLUSTERS * self.cluster_tokens
        return self.pending_tokens

    def __post_init__(self) -> None:
        if not 1 <= self.cluster_tokens <= self.cluster_tokens_max:
            raise ValueError(
                "clusters: cluster_tokens must be at least 1 and at most cluster_tokens_max, got "
                f"{self.cluster_tokens} and {self.cluster_tokens_max}"
            )
        if self.block_tokens < 2 * self.cluster_tokens:
            raise ValueError(
                "clusters: block_tokens must be at least twice cluster_tokens, got "
                f"{self.block_tokens} and {self.cluster_tokens}"
            )
        if not self.split_factor > 0 or min(self.pending_tokens, self.sink_tokens) < 0:
            raise ValueError(
                "clusters: split_factor must be above 0, pending_tokens and sink_tokens at least "
                f"0, got {self.split_factor}, {self.pending_tokens} and {self.sink_tokens}"
            )
        if self.update not in UPDATES:
            raise ValueError(
                f"clusters: update must be one of {', '.join(UPDATES)}, got {self.update!r}"
            )


class Clusters:
    """The clusters of one row, its tokens named by their number.

    Tokens leave the tail in order: those of the prompt at once (`enter_prompt`), later ones at the
    end of a step (`enter`). Keys stay with the caller, ``[tokens, width]`` fp32, and are given to
    each call. Arithmetic is fp32. Ties go to the lower number.

    Parameters
    ----------
    width
        Of a key.
    tokens_max
        That the row will ever have: there are never more than ceil(1.25 tokens_max /
        cluster_tokens) clusters, however often they split.

    Attributes
    ----------
    place
        ``[tokens_max]`` int64: a token's cluster, or `SINK`, `PENDING`, `TAIL`. Tokens that have
        not come yet are in the tail.
    count, left
        Clusters, and tokens that have left the tail, sinks included.
    centroid, size, variance
        ``[clusters_max, width]``, ``[clusters_max]``, ``[clusters_max]``, of the first `count`.
    threshold
        Variance that no cluster is to exceed; None until 512 tokens are clustered.
    splits, refused, forced
        So often a cluster was split, none was for lack of numbers, one was read for what waits.
    """

    def __init__(self, width: int, tokens_max: int, options: ClusterOptions):
        if width < 1 or tokens_max < 1:
            raise ValueError(
                f"clusters: width and tokens_max must be positive, got {width} and {tokens_max}"
            )
        self.options = options
        self.clusters_max = self._share_of(tokens_max)
        self.place = torch.full((tokens_max,), TAIL)
        self.place[: options.sink_tokens] = SINK
        self.count = self.splits = self.refused = self.forced = 0
        self.left = min(options.sink_tokens, tokens_max)
        self.centroid = torch.zeros(self.clusters_max, width)
        self.size = torch.zeros(self.clusters_max, dtype=torch.int64)
        self.variance = torch.zeros(self.clusters_max)
        self.threshold: float | None = None
        self._waiting: dict[int, list[int]] = {}  # cluster -> tokens
        self._later: list[int] = []  # that wait to be clustered among themselves
        self._counted = torch.zeros(self.clusters_max, dtype=torch.int64)  # comparable members
        self._changed: set[int] = set()  # by a split of this step

    def copy(self) -> Clusters:
        """Another row with the same past."""
        other = copy.copy(self)
        for name in ("place", "centroid", "size", "variance", "_counted"):
            setattr(other, name, getattr(self, name).clone())
        other._waiting = {cluster: list(tokens) for cluster, tokens in self._waiting.items()}
        other._later = list(self._later)
        other._changed = set()
        return other

    @property
    def pending(self) -> int:
        """Tokens that wait; they are attended in every step."""
        return sum(map(len, self._waiting.values())) + len(self._later)

    def members(self, cluster: int) -> torch.Tensor:
        """Its tokens, rising."""
        return (self.place[: self.left] == cluster).nonzero().flatten()

    def enter_prompt(self, keys: torch.Tensor, end: int) -> None:
        """Clusters the tokens before `end`, in blocks: k-means, then splits what is too large.

        And what is too wide, the widest of the block first, while there are at most 1.25 times as
        many clusters as the tokens so far would fill. Nothing waits: everything is in memory.
        """
        for block in torch.arange(min(self.left, end), end).split(self.options.block_tokens):
            if len(block) < 2 * self.options.cluster_tokens:
                self._enter_in_memory(keys, block)
            else:
                self._enter_block(keys, block)
        self._changed.clear()

    def enter(self, keys: torch.Tensor, end: int, read: Container[int]) -> list[int]:
        """Tokens before `end` leave the tail, at the end of a step that has read these clusters.

        Returns
        -------
        list of int
            Clusters that had to be read besides, since too many tokens waited.
        """
        for token in range(self.left, end):
            self._enter_later(keys, token, read)
        if self.options.update == "local" and len(self._later) >= self.options.waiting_max:
            self._cluster_later(keys)
        for cluster in sorted(cluster for cluster in self._waiting if cluster in read):
            self._take_in_waiting(keys, cluster)
        forced = []
        while self._waiting and self.pending >= self.options.pending_tokens:
            most = max(self._waiting, key=lambda cluster: (len(self._waiting[cluster]), -cluster))
            self._take_in_waiting(keys, most)
            forced.append(most)
        self.forced += len(forced)
        self._changed.clear()
        return forced

    def _share_of(self, tokens: int) -> int:
        return math.ceil(CLUSTERS_SHARE * tokens / self.options.cluster_tokens)

    def _enter_block(self, keys: torch.Tensor, block: torch.Tensor) -> None:
        usual = comparable(keys[block])
        tokens = block[usual]
        first = self.count
        wanted = max(1, round(len(tokens) / self.options.cluster_tokens))
        wanted = min(wanted, self.clusters_max - first, len(tokens))
        if wanted > 0:
            label = k_means(keys[tokens], wanted)
            for cluster in range(int(label.max()) + 1):
                self._set(keys, self._new(), tokens[label == cluster])
            tokens = tokens[:0]
        self.left = int(block[-1]) + 1
        self._enter_in_memory(keys, torch.cat([tokens, block[~usual]]))
        self._settle_threshold()
        self._divide_block(keys, first)

    def _enter_in_memory(self, keys: torch.Tensor, tokens: torch.Tensor) -> None:
        """One by one, with every cluster at hand."""
        for token in tokens.tolist():
            self._enter_one(keys, token, range(self.clusters_max))
            self._changed.clear()

    def _divide_large(self, keys: torch.Tensor, first: int) -> None:
        for cluster in range(first, self.count):
            if self.size[cluster] > self.options.cluster_tokens_max:
                self._split(keys, cluster, self.members(cluster))

    def _divide_block(self, keys: torch.Tensor, first: int) -> None:
        self._divide_large(keys, first)
        most = min(self.clusters_max, self._share_of(self.left))
        while self.threshold is not None and first < self.count < most:
            widest = first + int(self.variance[first : self.count].argmax())
            if not self.variance[widest] > self.threshold:
                break
            self._split(keys, widest, self.members(widest))

    def _settle_threshold(self) -> None:
        """Fixed once: what is too wide stays the same while the row grows."""
        sizes = self.size[: self.count]
        clustered = int(sizes.sum())
        if self.threshold is None and clustered >= THRESHOLD_TOKENS:
            mean = float((sizes * self.variance[: self.count]).sum()) / clustered
            self.threshold = self.options.split_factor * mean

    def _enter_later(self, keys: torch.Tensor, token: int, read: Container[int]) -> None:
        """One token that comes after the prompt."""
        if self.options.update == "adaptive" or not comparable(keys[token]):
            self._enter_one(keys, token, read)
            return
        self.left = token + 1
        if self.options.update == "local":
            self.place[token] = PENDING
            self._later.append(token)
            return
        is_free = self.size[: self.count] < self.options.cluster_tokens_max
        cluster = self._nearest(keys[token], is_free)
        if cluster is None:
            self._open_or_make_room(keys, token)
        else:
            self.place[token] = cluster
            self.size[cluster] += 1

    def _cluster_later(self, keys: torch.Tensor) -> None:
        """Those that wait, among themselves; where no number is left they join where room is."""
        tokens, self._later = torch.tensor(self._later), []
        first = self.count
        count = min(LOCAL_CLUSTERS, self.clusters_max - first)
        if count == 0:
            for token in tokens.tolist():
                self._join_where_room_is(keys, token)
            return
        label = k_means(keys[tokens], count)
        for cluster in range(int(label.max()) + 1):
            self._set(keys, self._new(), tokens[label == cluster])
        self._divide_large(keys, first)

    def _enter_one(self, keys: torch.Tensor, token: int, read: Container[int]) -> None:
        """One token joins its nearest cluster, splits it, or waits for it."""
        self.left = max(self.left, token + 1)
        if not comparable(keys[token]):
            self._put_apart(keys, token)
            return
        cluster = self._nearest(keys[token])
        if cluster is None:
            self._open_or_make_room(keys, token)
        elif self._would_fit(keys[token], cluster):
            self._join(keys[token], cluster, token)
        elif self.count == self.clusters_max:
            self.refused += 1
            self._join_where_room_is(keys, token)
        elif cluster in read and cluster not in self._changed:
            self._split(keys, cluster, torch.cat([self.members(cluster), torch.tensor([token])]))
        else:
            self.place[token] = PENDING
            self._waiting.setdefault(cluster, []).append(token)
        self._settle_threshold()

    def _would_fit(self, key: torch.Tensor, cluster: int) -> bool:
        if self.threshold is None:
            return int(self.size[cluster]) < self.options.cluster_tokens
        if int(self.size[cluster]) >= self.options.cluster_tokens_max:
            return False
        return self._grown(key, cluster)[1] <= self.threshold

    def _grown(self, key: torch.Tensor, cluster: int) -> tuple[torch.Tensor, float]:
        """Centroid and variance with one more key (UpdateVar)."""
        size, centroid = int(self._counted[cluster]), self.centroid[cluster]
        step = key - centroid
        moved = centroid + step / (size + 1)
        total = size * float(self.variance[cluster]) + float(step @ (key - moved))
        return moved, total / (size + 1)

    def _join(self, key: torch.Tensor, cluster: int, token: int) -> None:
        self.centroid[cluster], self.variance[cluster] = self._grown(key, cluster)
        self.size[cluster] += 1
        self._counted[cluster] += 1
        self.place[token] = cluster

    def _nearest(self, key: torch.Tensor, among: torch.Tensor | None = None) -> int | None:
        """The cluster whose centroid is nearest; None where there is none."""
        shut = self._counted[: self.count] == 0
        shut = shut if among is None else shut | ~among
        if shut.all():
            return None
        apart = squares(self.centroid[: self.count] - key)
        return int(apart.masked_fill(shut, torch.inf).argmin())

    def _put_apart(self, keys: torch.Tensor, token: int) -> None:
        """A key without a distance has a cluster of its own; there its centroid is zero."""
        if self.count < self.clusters_max:
            self._set(keys, self._new(), torch.tensor([token]))
        else:
            self.refused += 1
            self._join_where_room_is(keys, token)

    def _open_or_make_room(self, keys: torch.Tensor, token: int) -> None:
        if self.count < self.clusters_max:
            self._set(keys, self._new(), torch.tensor([token]))
        else:
            self._join_where_room_is(keys, token)

    def _join_where_room_is(self, keys: torch.Tensor, token: int) -> None:
        """The nearest cluster that is not full; there is one, as the number of clusters is made."""
        is_free = self.size[: self.count] < self.options.cluster_tokens_max
        key = keys[token]
        cluster = self._nearest(key, is_free) if comparable(key) else None
        if cluster is None:
            cluster = int(is_free.long().argmax())
        if comparable(key):
            self._join(key, cluster, token)
        else:
            self.place[token] = cluster
            self.size[cluster] += 1

    def _take_in_waiting(self, keys: torch.Tensor, cluster: int) -> None:
        """The cluster is in memory: it is split together with what waits for it."""
        waiting = self._waiting.pop(cluster)
        if self.count < self.clusters_max:
            tokens = torch.cat([self.members(cluster), torch.tensor(waiting)])
            self._split(keys, cluster, tokens.sort().values)
            return
        self.refused += 1
        for token in waiting:
            self._join_where_room_is(keys, token)

    def _split(self, keys: torch.Tensor, cluster: int, tokens: torch.Tensor) -> None:
        """In two, and further only while a part is too large; the largest keeps the number.

        Where no number is left, what a full part cannot hold joins the nearest that has room: of
        those that are new to it.
        """
        most, parts = self.options.cluster_tokens_max, [tokens]
        while self.count + len(parts) <= self.clusters_max:
            largest = max(range(len(parts)), key=lambda i: (len(parts[i]), -i))
            if len(parts) > 1 and len(parts[largest]) <= most:
                break
            part = parts.pop(largest)
            is_second = split_in_two(keys[part])
            parts += [part[~is_second], part[is_second]]
        parts.sort(key=len, reverse=True)
        parts = [part[(self.place[part] != cluster).long().argsort(stable=True)] for part in parts]
        for number, part in enumerate(parts):
            to = cluster if number == 0 else self._new()
            self._set(keys, to, part[:most])
            self._changed.add(to)
        self.splits += len(parts) - 1
        for token in torch.cat([part[most:] for part in parts]).tolist():
            self._join_where_room_is(keys, token)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _set(self, keys: torch.Tensor, cluster: int, tokens: torch.Tensor) -> None:
        """The cluster has these tokens now; centroid and variance are computed anew."""
        self.place[tokens] = cluster
        self.size[cluster] = len(tokens)
        self._counted[cluster] = comparable(keys[tokens]).sum()
        self.centroid[cluster], self.variance[cluster] = mean_variance(keys[tokens])
