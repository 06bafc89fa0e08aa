"""What a layer's reads add to a step, by whether and how its query is predicted.

Without a prediction a layer waits for all that it reads. A trusted prediction selects: reads begin
one layer early. A verified one only prefetches: the layer selects by its own query, reads what is
missing then, and has paid for a second scoring and for groups that were read in vain.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvswap_torch.tuning.step_model import Disk, LayerLoads, LoadingModel, disk_seconds
from kvswap_torch.tuning.traffic import Prefetched, Traffic

# A verified prediction is made behind the attention of the layer before: about half of a layer's
# period is left for its reads.
VERIFIED_PERIOD = 0.5


@dataclass(frozen=True)
class LayerTime:
    """Of one layer and step, all sequences together; seconds.

    Parameters
    ----------
    predicts
        Whether the layer's query is predicted.
    load
        Of the cores, for its reads.
    wait
        Until they are there.
    predict
        The query's prediction, and what is scored by it beside the selection.
    io
        Of the disk, hidden or not.
    bytes_read
        What was prefetched in vain included.
    """

    predicts: bool
    load: float
    wait: float
    predict: float
    io: float
    bytes_read: float

    @property
    def seconds(self) -> float:
        """What it adds to a step."""
        return self.load + self.wait + self.predict


@dataclass(frozen=True)
class LayerClock:
    """Of one setting.

    Parameters
    ----------
    period
        Seconds of a step without loads, over its layers.
    query, scoring
        Seconds to predict a layer's query, and to score groups by it.
    """

    loading: LoadingModel
    disk: Disk
    batch: int
    period: float
    query: float
    scoring: float

    def plain(self, traffic: Traffic) -> LayerTime:
        """Selects and reads in its turn."""
        return self._read(traffic, 0.0)

    def early(self, traffic: Traffic) -> LayerTime:
        """Reads one layer ahead what is known without a prediction."""
        return self._read(traffic, self.period)

    def trusted(self, traffic: Traffic) -> LayerTime:
        """Reads one layer ahead what the predicted query selects."""
        return dataclasses.replace(
            self._read(traffic, self.period), predicts=True, predict=self.query
        )

    def verified(self, prefetched: Prefetched) -> LayerTime:
        """Prefetches by the predicted query, then selects by its own and reads what is missing."""
        ahead, late = self._loads(prefetched.early), self._loads(prefetched.late)
        io = disk_seconds(self.disk, ahead), disk_seconds(self.disk, late)
        return LayerTime(
            predicts=True,
            load=self.loading.busy(ahead) + self.loading.busy(late),
            wait=self.loading.waited(io[0], VERIFIED_PERIOD * self.period) + io[1],
            predict=self.query + self.scoring,
            io=sum(io),
            bytes_read=ahead.bytes_read + late.bytes_read,
        )

    def best_verified(self, traffic: Traffic, prefetched: Prefetched | None) -> LayerTime:
        """As the engine decides while it runs: with a prediction where that takes less time."""
        plain = self.plain(traffic)
        if prefetched is None:
            return plain
        return min(plain, self.verified(prefetched), key=lambda each: each.seconds)

    def _read(self, traffic: Traffic, period: float) -> LayerTime:
        loads = self._loads(traffic)
        io = disk_seconds(self.disk, loads)
        return LayerTime(
            predicts=False,
            load=self.loading.busy(loads),
            wait=self.loading.waited(io, period),
            predict=0.0,
            io=io,
            bytes_read=loads.bytes_read,
        )

    def _loads(self, traffic: Traffic) -> LayerLoads:
        return LayerLoads(self.batch * traffic.reads, self.batch * traffic.bytes_read)


def together(first: LayerTime, then: LayerTime) -> LayerTime:
    """A layer that reads twice in a step."""
    return LayerTime(
        first.predicts or then.predicts,
        first.load + then.load,
        first.wait + then.wait,
        first.predict + then.predict,
        first.io + then.io,
        first.bytes_read + then.bytes_read,
    )
