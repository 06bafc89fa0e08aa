"""What a method's choices on a document read, and how long modelled devices take for it."""

from __future__ import annotations

from typing import Any

import torch

from bench.quality.clusters import ClusterMethod
from bench.quality.disk import DiskUse, Want, replay
from bench.quality.document import Document, Sample
from bench.quality.methods import Resolved
from bench.quality.tasks import LOSSES
from bench.quality.view import View
from kvswap_torch.tuning.traffic import Merging

REPLAYED = 2  # samples whose choices are replayed through a reuse buffer


class Reading:
    """Notes each step's choice; `as_dict` replays those of the first samples.

    A row of a layer is what chooses for itself: all KV heads, or each.
    """

    def __init__(self, resolved: Resolved, document: Document, layers: int):
        self._resolved = resolved
        asked = [i for i, sample in enumerate(document.samples) if sample.task not in LOSSES]
        self._replayed = set(asked[:REPLAYED])
        self._use = DiskUse(layers)
        self._hits: list[float] = []
        self._steps = self._records = self._tokens = self._clusters = 0
        self._reads_all = False  # in some layer

    def begin(self, batch: list[int], samples: list[Sample]) -> None:
        """The next calls are of these samples."""
        self._batch, self._samples = batch, samples

    def note(self, view: View, mask: torch.Tensor | None) -> None:
        """One layer's choice."""
        if self._resolved.record_bytes == 0:
            return
        if mask is None:
            self._reads_all = True
            return
        for place, number in enumerate(self._batch):
            rows = len(self._samples[place].ids) - 1
            wants = self._wants(view, mask, place, rows)
            if number in self._replayed and min(map(len, wants)) > 1:
                self._replay(wants)

    def _wants(self, view: View, mask: torch.Tensor, place: int, rows: int) -> list[list[Want]]:
        """Of one sample, by row of the layer, then step; adds to what is counted."""
        method = self._resolved.method
        if isinstance(method, ClusterMethod):
            taken = method.taken
            self._clusters = max(self._clusters, taken.clusters)
            wants = [steps[:rows] for steps in taken.wants[place]]
            self._tokens += sum(sum(tokens[:rows]) for tokens in taken.tokens[place])
        else:
            chosen = self._resolved.frame.chosen(mask[place : place + 1], view)[0]
            wants = [self._of_groups(head[:rows]) for head in chosen]
            groups = sum(len(want.names) for steps in wants for want in steps)
            self._tokens += groups * self._resolved.frame.group_tokens
        self._steps += sum(map(len, wants))
        self._records += sum(len(want.names) for steps in wants for want in steps)
        return wants

    def _of_groups(self, chosen: torch.Tensor) -> list[Want]:
        """``[steps, groups]`` bool; rows that attend everything chose nothing."""
        steps = chosen[chosen.sum(1) <= self._resolved.frame.groups_max]
        names = [step.nonzero().flatten().numpy() for step in steps]
        return [Want(each, each) for each in names]

    def _replay(self, wants: list[list[Want]]) -> None:
        resolved, config = self._resolved, self._resolved.config
        record = resolved.record_bytes // len(wants)
        merging = Merging(record, config.merge_gap_bytes, config.merge_bytes_max)
        replayed = [replay(each, resolved.pages, config.replacement, merging) for each in wants]
        self._hits += [share for _, share in replayed]
        self._use.add([reads for reads, _ in replayed])

    def as_dict(self) -> dict[str, Any]:
        """Of a layer's row and step: records and tokens chosen; of a token: what is read.

        ``hit_rate`` of the reuse buffer, and ``disk``, are of the replayed samples without their
        first step; None where nothing is read, or a layer attends everything.
        """
        each = 1 / self._steps if self._steps else 0.0
        hits = self._hits
        return {
            "hit_rate": round(sum(hits) / len(hits), 4) if hits else None,
            "groups_per_step": round(each * self._records, 2),
            "tokens_per_step": round(each * self._tokens, 1),
            "clusters": self._clusters or None,
            "disk": None if self._reads_all else self._use.as_dict(),
        }
