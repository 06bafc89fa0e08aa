"""What a report shows: plain numbers, so that a page can be drawn again without measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvswap_torch.errors import ConfigError
from kvswap_torch.tuning.disk import DiskFigures, DiskModel

WAIT = "wait"
"""The part of a token's time that is spent waiting for the disk."""


@dataclass(frozen=True)
class Point:
    """A setting that was judged.

    Parameters
    ----------
    setting
        Name -> value, as `solver.Setting` has them: group_tokens, rank, capacity.
    records
        What records hold.
    shares_pages
        Do two layers have pages at a time?
    rank_total
        Columns of all layers together.
    recall
        Mean over layers of the attention mass that the chosen groups hold, 0 to 1.
    bytes_per_token
        Read from the disk for one token of one sequence.
    seconds_per_token
        Of a decoding step; every sequence of the batch gets one token in it.
    parts
        Use -> seconds, `WAIT` among them; together `seconds_per_token`.
    memory_bytes
        Of the whole session.
    solver
        Who chose it: "exhaustive", "greedy", both with a comma, or nobody: empty.
    """

    setting: dict[str, int]
    rank_total: int
    recall: float
    bytes_per_token: float
    seconds_per_token: float
    parts: dict[str, float]
    memory_bytes: int
    chosen: bool = False
    solver: str = ""
    records: str = "model"
    shares_pages: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Of one sequence."""
        return 1 / self.seconds_per_token


@dataclass(frozen=True)
class ReportData:
    """All that a report shows.

    Parameters
    ----------
    energy
        For each layer the share of the scores' variance that the first 1, 2, 3 ... columns keep.
    recall
        Layer -> rank -> attention mass that the chosen groups hold.
    reuse
        Replacement policy -> tokens kept -> share of chosen groups that were in memory already.
    points
        Settings that were judged, one of them chosen.
    budget_bytes
        Memory limit.
    recall_best
        Layer -> what the best possible choice of as many groups holds.
    ranks
        The chosen columns of each layer.
    replacement
        The chosen policy.
    record_bytes
        What one group of the chosen setting takes on disk.
    facts
        Name -> value, about model and machine: shown as they are.
    """

    disk: DiskFigures
    disk_model: DiskModel
    energy: list[list[float]]
    recall: dict[int, dict[int, float]]
    reuse: dict[str, dict[int, float]]
    points: list[Point]
    budget_bytes: int
    recall_best: dict[int, float] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    replacement: str = ""
    record_bytes: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        chosen = sum(point.chosen for point in self.points)
        if chosen != 1:
            raise ConfigError(f"report: one point must be the chosen one, got {chosen}")

    @property
    def chosen(self) -> Point:
        """The point that the config is made of."""
        return next(point for point in self.points if point.chosen)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        return dataclasses.asdict(self) | {"disk": self.disk.to_json()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ReportData:
        """What `to_json` gave, also after JSON made strings of the numbers that are keys."""
        return cls(
            **{
                **plain,
                "disk": DiskFigures.from_json(plain["disk"]),
                "disk_model": DiskModel.from_json(plain["disk_model"]),
                "recall": {int(k): _int_keys(v) for k, v in plain["recall"].items()},
                "reuse": {policy: _int_keys(v) for policy, v in plain["reuse"].items()},
                "recall_best": _int_keys(plain["recall_best"]),
                "points": [Point(**point) for point in plain["points"]],
            }
        )


def _int_keys(plain: Mapping[Any, float]) -> dict[int, float]:
    return {int(key): value for key, value in plain.items()}


def neighbours(data: ReportData, most: int = 6) -> list[Point]:
    """Settings that differ from the chosen one in one value, and by little; nearest first."""
    chosen = data.chosen

    def distance(point: Point) -> tuple[int, float]:
        ratios = [
            max(value, chosen.setting[name]) / max(1, min(value, chosen.setting[name]))
            for name, value in point.setting.items()
            if name in chosen.setting and value != chosen.setting[name]
        ]
        ratios += [2.0] * (point.records != chosen.records)
        ratios += [2.0] * (point.shares_pages != chosen.shares_pages)
        return len(ratios), sum(ratios)

    others = [point for point in data.points if not point.chosen]
    near = [point for point in others if distance(point)[0] == 1]
    if not near:
        near = others
    return sorted(near, key=lambda point: (distance(point), sorted(point.setting.items())))[:most]


def setting_text(point: Point) -> str:
    """ "G 4, rank 32, 600 kept"."""
    words = {"group_tokens": "G {}", "rank": "rank {}", "capacity": "{:,} kept"}
    known = [name for name in words if name in point.setting]
    others = sorted(name for name in point.setting if name not in words)
    told = [
        words.get(name, name.replace("_", " ") + " {}").format(point.setting[name])
        for name in [*known, *others]
    ]
    told += [point.records] * (point.records != "model")
    return ", ".join(told + ["pages of two layers"] * point.shares_pages)
