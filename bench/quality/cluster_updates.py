"""What clusters are compared with: others' ways to take in tokens that come after the prompt."""

from __future__ import annotations

from collections.abc import Container

import torch

from bench.quality.engine_clusters import EngineClusters
from kvswap_torch.methods.clusters import PENDING, ClusterOptions, Clusters
from kvswap_torch.methods.k_means import comparable, k_means

LOCAL_CLUSTERS = 4  # made at once of later tokens


class StaticClusters(Clusters):
    """The prompt's clusters for good: a token joins the nearest, whose centroid stays (PQCache).

    They grow without limit.
    """

    def enter(self, keys: torch.Tensor, end: int, read: Container[int]) -> list[int]:
        for token in range(self.left, end):
            usual = comparable(keys[token]) and self.count > 0
            cluster = self._nearest(keys[token]) if usual else None
            if cluster is None:
                self._enter_in_memory(keys, torch.tensor([token]))
            else:
                self.place[token] = cluster
                self.size[cluster] += 1
            self.left = token + 1
        return []


class LocalClusters(Clusters):
    """Later tokens are clustered among themselves, the older clusters stay (ClusterKV).

    They wait, and are attended, until they fill `LOCAL_CLUSTERS` clusters.
    """

    def enter(self, keys: torch.Tensor, end: int, read: Container[int]) -> list[int]:
        self.place[self.left : end] = PENDING
        self.left = max(self.left, end)
        tokens = (self.place[: self.left] == PENDING).nonzero().flatten()
        if len(tokens) >= LOCAL_CLUSTERS * self.options.cluster_tokens:
            self._cluster(keys, tokens)
        return []

    @property
    def pending(self) -> int:
        return int((self.place[: self.left] == PENDING).sum())

    def _cluster(self, keys: torch.Tensor, tokens: torch.Tensor) -> None:
        usual = comparable(keys[tokens])
        self._enter_in_memory(keys, tokens[~usual])
        tokens = tokens[usual]
        count = min(LOCAL_CLUSTERS, self.clusters_max - self.count, len(tokens))
        if count < 1:
            self._enter_in_memory(keys, tokens)
            return
        label = k_means(keys[tokens], count)
        for cluster in range(int(label.max()) + 1):
            self._set(keys, self._new(), tokens[label == cluster])


Row = Clusters | EngineClusters

UPDATES: dict[str, type[Row]] = {
    "adaptive": EngineClusters,
    "static": StaticClusters,
    "local": LocalClusters,
}


def clusters_of(update: str, width: int, tokens_max: int, options: ClusterOptions) -> Row:
    """A row that takes later tokens in this way."""
    return UPDATES[update](width, tokens_max, options)
