"""What clusters are compared with: others' ways to take in tokens that come after the prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

import torch

from bench.quality.engine_clusters import EngineClusters
from kvswap_torch.methods.clusters import UPDATES, ClusterOptions, Clusters

__all__ = ["UPDATES", "Row", "clusters_of"]


class BoundlessClusters(Clusters):
    """Those of other systems: once the prompt has been divided they grow without limit.

    Static ones are PQCache's, local ones ClusterKV's.
    """

    def enter(self, keys: torch.Tensor, end: int, read: Container[int]) -> list[int]:
        if self.options.cluster_tokens_max < len(self.place):
            self.options = dataclasses.replace(self.options, cluster_tokens_max=len(self.place))
        return super().enter(keys, end, read)


Row = Clusters | EngineClusters


def clusters_of(update: str, width: int, tokens_max: int, options: ClusterOptions) -> Row:
    """A row that takes later tokens in this way."""
    made = dataclasses.replace(options, update=update)
    kind = EngineClusters if update == "adaptive" else BoundlessClusters
    return kind(width, tokens_max, made)
