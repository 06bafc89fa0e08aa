"""The engine's own clusters, with the face of the reference that they are compared with."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict

import torch

from tests.python.reference_methods.clusters import ClusterOptions


class EngineClusters:
    """`reference_methods.clusters.Clusters`, computed by its C++ twin (`adaptive_clusters.h`).

    The same rules; sums in between are fp64, so that threads and the CPU change no bit. What is
    given out are copies.
    """

    def __init__(self, width: int, tokens_max: int, options: ClusterOptions):
        from kvswap_torch import _C

        self.options = options
        self._row = _C.Clusters(width, tokens_max, **asdict(options))

    def copy(self) -> EngineClusters:
        """Another row with the same past."""
        other = object.__new__(EngineClusters)
        other.options, other._row = self.options, type(self._row)(self._row)
        return other

    place = property(lambda self: self._row.place.long())
    size = property(lambda self: self._row.size.long())
    variance = property(lambda self: self._row.variance)
    centroid = property(lambda self: self._row.centroid)
    count = property(lambda self: self._row.count)
    clusters_max = property(lambda self: self._row.clusters_max)
    left = property(lambda self: self._row.left)
    pending = property(lambda self: self._row.pending)
    threshold = property(lambda self: self._row.threshold)
    splits = property(lambda self: self._row.splits)
    refused = property(lambda self: self._row.refused)
    forced = property(lambda self: self._row.forced)

    def members(self, cluster: int) -> torch.Tensor:
        """Its tokens, rising."""
        return torch.tensor(self._row.members(cluster), dtype=torch.int64)

    def enter_prompt(self, keys: torch.Tensor, end: int) -> None:
        """See `Clusters.enter_prompt`; fp32 keys."""
        self._row.enter_prompt(keys, end)

    def enter(self, keys: torch.Tensor, end: int, read: Container[int]) -> list[int]:
        """See `Clusters.enter`; fp32 keys."""
        known = [cluster for cluster in range(self._row.count) if cluster in read]
        return self._row.enter(keys, end, known)
