"""Projections to compare: the config's own, and others fitted to the harness's own documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.quality.document import Document, Writer
from kvswap_torch.config import SwapConfig
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.rotary import rotary_channels
from kvswap_torch.projection import Pair
from kvswap_torch.projection_file import load_projections, save_projections
from kvswap_torch.tuning.calibration import Progress, gather_moments
from kvswap_torch.tuning.observe import Calibrator
from kvswap_torch.tuning.samples import Sample

FITTED = {  # name -> the moments' kind, and which queries they are made of
    "svd": ("svd_keys", "true"),  # the paper's: singular vectors of the keys
    "query-aware": ("query_aware", "true"),
    "corrected": ("query_aware", "predicted"),  # for queries as they are predicted
}
# Made from each document, as a cache without a calibration makes those of the config's kind.
BLOCKS = ("pca_per_head", "skewed", "channels", "rope_pairs")
ESTIMATED = ("estimated", *BLOCKS)
KINDS = ("file", *ESTIMATED, *FITTED)
LENGTHS = (2048, 4096, 2048, 4096)  # tokens of the documents that are fitted to
RANK_MAX = 128


class Projections:
    """Makes each kind when it is first asked for, and keeps it on disk.

    Parameters
    ----------
    config
        Whose projection file is the kind ``file``.
    folder
        Where fitted ones are kept; it must belong to these weights and this writer's settings.
    """

    def __init__(
        self,
        model: object,
        parts: ModelParts,
        config: SwapConfig,
        writer: Writer,
        folder: Path,
        progress: Progress | None = None,
        lengths: Sequence[int] = LENGTHS,
    ):
        self._model, self._parts, self._config = model, parts, config
        self._writer, self._folder, self._progress = writer, folder, progress
        self._lengths = tuple(lengths)
        self.rank_max = min(RANK_MAX, parts.shape.width)
        self.rotary = rotary_channels(parts)
        self._made: dict[str, list[Pair]] = {}

    def pairs(self, kind: str, ranks: Sequence[int]) -> list[Pair] | None:
        """One pair a layer with at least `ranks` columns; None for those of `ESTIMATED`.

        Raises
        ------
        ValueError
            For an unknown kind, or one that does not exist for this model.
        ConfigError
            When the config's file has too few columns.
        """
        if kind in ESTIMATED:
            return None
        if kind == "file":
            if self._config.projection_file is None:
                raise ValueError(
                    "projection: there must be a kvswap.json with a projection_file beside the "
                    "model for projection=file; use projection=estimated"
                )
            width = self._parts.shape.width
            heads = self._config.heads
            return load_projections(self._config.projection_path, ranks, width, heads=heads)
        if kind not in FITTED:
            raise ValueError(f"projection: must be one of {', '.join(KINDS)}, got {kind!r}")
        if max(ranks) > self.rank_max:
            raise ValueError(f"rank: must be at most {self.rank_max}, got {max(ranks)}")
        if kind not in self._made:
            self._made[kind] = self._load_or_fit(kind)
        return self._made[kind]

    def _load_or_fit(self, kind: str) -> list[Pair]:
        lengths = "-".join(map(str, self._lengths))
        path = self._folder / f"projection-{kind}-{lengths}.safetensors"
        if not path.exists():
            self._fit(FITTED[kind][1], lengths)
        shape = self._parts.shape
        return load_projections(path, [self.rank_max] * shape.layers, shape.width)

    def _fit(self, query: str, lengths: str) -> None:
        samples = [
            as_sample(self._writer.write(length, number, fitted=True))
            for number, length in enumerate(self._lengths)
        ]
        calibrator = Calibrator(self._model)
        moments = gather_moments(calibrator, samples, query, self._progress)
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, (kind, of) in FITTED.items():
            if of == query:
                pairs = [moment.pair(kind, self.rank_max) for moment in moments]
                path = self._folder / f"projection-{name}-{lengths}.safetensors"
                save_projections(path, pairs, kind=kind)


def as_sample(document: Document) -> Sample:
    """A document and all that is asked about it, as calibration reads it."""
    import torch

    ids = torch.cat([document.ids, *(sample.ids for sample in document.samples)])
    return Sample(ids, len(document.ids))
