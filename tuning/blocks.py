"""Projections from keys and queries of text: what prompts else make for themselves.

Loki, InfiniGen and KVSwap find theirs beforehand, over other text than the one that is asked about.
Loki's and InfiniGen's have one block for each KV head, KVSwap's is the SVD of all heads' keys. The
rules are those of `kvswap_torch.projection.from_chunk`, over second moments of every sample's keys
and of the queries of tokens in focus: those of all query heads that share a KV head count alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvswap_torch.config import Summary, SwapConfig
from kvswap_torch.config.engine import engine_value
from kvswap_torch.errors import ConfigError
from kvswap_torch.preset.definition import Shape
from kvswap_torch.projection import Pair, flat_tokens, pair_from_moments
from kvswap_torch.projection_file import save_projections
from kvswap_torch.tuning.calibration import read_samples
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.samples import Sample

BLOCKS = ("pca_per_head", "skewed", "channels", "rope_pairs")
FITTED = (*BLOCKS, "svd_keys")


class KeyMoment:
    """Second moment of one layer's keys, all KV heads side by side (KVSwap, section 3.2)."""

    def __init__(self, width: int):
        self._sum = torch.zeros(width, width, dtype=torch.float64)
        self._count = 0

    def add(self, seen: Observed, focus: int) -> None:
        """Counts a sample's keys; `focus` makes no difference to them."""
        keys = flat_tokens(seen.keys).double()
        self._sum += keys.T @ keys
        self._count += len(keys)

    def pair(self, columns: int) -> Pair:
        """The leading right singular vectors of the keys, for keys and queries alike."""
        return pair_from_moments("svd_keys", (self._sum / self._count).float(), None, columns)


class HeadMoments:
    """Of one layer, in memory that does not grow: ``[kv_heads, head_dim, head_dim]`` fp64 twice."""

    def __init__(self, kv_heads: int, head_dim: int):
        size = (kv_heads, head_dim, head_dim)
        self.keys = torch.zeros(size, dtype=torch.float64)
        self.queries = torch.zeros(size, dtype=torch.float64)
        self._sum = torch.zeros(size[:2], dtype=torch.float64)
        self._count = 0

    def add(self, seen: Observed, focus: int) -> None:
        """Counts a sample; tokens from `focus` on ask."""
        keys, asked = seen.keys[0].double(), asked_of(seen, focus)
        self.keys += keys.mT @ keys
        self.queries += asked.mT @ asked
        self._sum += keys.sum(1)
        self._count += keys.shape[1]

    @property
    def centred_keys(self) -> torch.Tensor:
        """``[kv_heads, head_dim, head_dim]``: about the mean, a sum as `keys` is."""
        return self.keys - self._sum[:, :, None] * self._sum[:, None] / max(1, self._count)


def asked_of(seen: Observed, focus: int) -> torch.Tensor:
    """Queries by the KV head that they ask: ``[kv_heads, heads of each * tokens, head_dim]``."""
    query = seen.query[0, :, focus:].double()
    return query.unflatten(0, (seen.keys.shape[1], -1)).flatten(1, 2)


def directions(moments: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of each head's, the largest first: ``[kv_heads, head_dim, head_dim]``."""
    return torch.linalg.eigh(moments)[1].flip(2)


def channels_of(moments: HeadMoments) -> torch.Tensor:
    """Single channels, by the product of the keys' and the queries' norms (ThinK 3.2)."""
    norms = moments.keys.diagonal(0, 1, 2).sqrt() * moments.queries.diagonal(0, 1, 2).sqrt()
    order = norms.argsort(dim=1, descending=True, stable=True)
    return torch.eye(norms.shape[1], dtype=torch.float64)[order].mT


def pairs_of(moments: HeadMoments, rotary: int) -> torch.Tensor:
    """Both channels of a pair, by the sum of squares of what it adds to products."""
    width = moments.keys.shape[1]
    turned, still = torch.arange(rotary), torch.arange(rotary, width)
    pairs = torch.cat([half.view(2, len(half) // 2).T for half in (turned, still)])  # [pairs, 2]
    at = (slice(None), pairs[:, :, None], pairs[:, None])
    order = (moments.keys[at] * moments.queries[at]).sum((2, 3))
    order = order.argsort(dim=1, descending=True, stable=True)
    return torch.eye(width, dtype=torch.float64)[pairs[order].flatten(1)].mT


def together(blocks: torch.Tensor, columns: int, heads: str, at_once: int = 1) -> Pair:
    """KV heads' columns below one another, or for ``heads="all"`` in turn, so many at once."""
    if heads == "each":
        matrix = blocks[:, :, :columns].flatten(0, 1)
    else:
        whole = torch.block_diag(*blocks)
        turns = torch.arange(len(whole)).unflatten(0, (len(blocks), -1, at_once))
        matrix = whole[:, turns.transpose(0, 1).flatten()[:columns]]
    matrix = matrix.float().contiguous()
    return matrix, matrix


def fit_blocks(
    model: Any,
    samples: Sequence[Sample],
    kind: str,
    columns: int,
    heads: str = "each",
    progress: Progress | None = None,
) -> list[Pair]:
    """One projection a layer on disk, as `save_projections` takes them.

    Parameters
    ----------
    model
        A transformers model that `kvswap_torch.KVSwapCache` supports.
    samples
        At least one; ``skewed`` reads them twice.
    kind
        ``pca_per_head``, ``skewed``, ``channels``, ``rope_pairs`` or ``svd_keys``.
    columns
        Of the largest rank: at most a key's width, ``head_dim`` with ``heads="each"`` and else
        ``kv_heads * head_dim``; even for ``rope_pairs``.
    heads
        As in `SwapConfig`.

    Raises
    ------
    ConfigError
        For another kind, a number of columns that does not fit, no samples, or ``rope_pairs`` of a
        model whose pairs are others.
    UnsupportedModelError
        When the model's cache cannot live on disk.
    """
    if kind not in FITTED:
        raise ConfigError(
            f"projection_kind: must be one of {', '.join(FITTED)}, got {kind!r}; `kvswap tune` "
            "makes the others, with a config around them"
        )
    if not samples:
        raise ConfigError("calibration: samples must be at least one, got none")
    calibrator = Calibrator(model)
    shape, at_once = calibrator.parts.shape, 2 if kind == "rope_pairs" else 1
    most = shape.head_dim if heads == "each" else shape.width
    if not 1 <= columns <= most or columns % at_once:
        even = ", even" if at_once == 2 else ""
        raise ConfigError(f"columns: must be 1 to {most}{even}, got {columns}")
    rotary = _rotary(calibrator) if kind == "rope_pairs" else 0
    is_joint = kind == "svd_keys" and heads == "all"
    moments = [
        KeyMoment(shape.width) if is_joint else HeadMoments(shape.kv_heads, shape.head_dim)
        for _ in range(shape.layers)
    ]

    def count(seen: Observed, sample: Sample) -> None:
        moments[seen.layer].add(seen, sample.focus)

    read_samples(calibrator, samples, count, f"fitting {kind}", progress)
    if is_joint:
        return [each.pair(columns) for each in moments]
    if kind == "svd_keys":
        blocks = [directions(each.keys) for each in moments]
    elif kind == "pca_per_head":
        blocks = [directions(each.centred_keys) for each in moments]
    elif kind == "channels":
        blocks = [channels_of(each) for each in moments]
    elif kind == "rope_pairs":
        blocks = [pairs_of(each, rotary) for each in moments]
    else:
        blocks = _skewed(calibrator, samples, [directions(m.queries) for m in moments], progress)
    return [together(each, columns, heads, at_once) for each in blocks]


def _skewed(
    calibrator: Calibrator,
    samples: Sequence[Sample],
    skews: list[torch.Tensor],
    progress: Progress | None,
) -> list[torch.Tensor]:
    """Skews whose columns stand in the order of what queries weigh in them, in all (InfiniGen)."""
    sizes = [torch.zeros(skew.shape[:2], dtype=torch.float64) for skew in skews]

    def weigh(seen: Observed, sample: Sample) -> None:
        sizes[seen.layer] += (asked_of(seen, sample.focus) @ skews[seen.layer]).abs().sum(1)

    read_samples(calibrator, samples, weigh, "weighing skewed columns", progress)
    return [
        skew.gather(2, size.argsort(dim=1, descending=True)[:, None].expand_as(skew))
        for skew, size in zip(skews, sizes, strict=True)
    ]


def _rotary(calibrator: Calibrator) -> int:
    from kvswap_torch.hf.rotary import check_pairs, rotary_channels

    check_pairs(SwapConfig(summary=Summary(projection="rope_pairs")), calibrator.parts)
    return rotary_channels(calibrator.parts)


def fitted_preset(
    model: Any,
    name: str,
    out: str | Path,
    samples: Sequence[Sample],
    alignment_bytes: int = 4096,
    progress: Progress | None = None,
) -> SwapConfig:
    """Writes a preset's config for a model, and beside it projections of samples.

    Parameters
    ----------
    out
        The config to write; the projections have its name with ``.projection.safetensors``.
    samples
        As `fit_blocks` takes them.
    alignment_bytes
        What the disk reads at once.

    Raises
    ------
    ConfigError
        As `SwapConfig.preset` and `fit_blocks`; for a preset without projections, or with others.
    """
    from kvswap_torch.hf.families import model_parts

    parts = model_parts(model)
    identity = parts.identity
    config = preset_to_fit(name, parts.preset_shape(alignment_bytes))
    kind, heads = config.summary.projection, engine_value(config, "heads")
    pairs = fit_blocks(model, samples, kind, config.summary.rank, heads, progress)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = f"{out.stem}.projection.safetensors"
    told = {"kind": kind, "model": identity, "heads": heads}
    save_projections(out.parent / beside, pairs, **told)
    config = config.with_settings({"summary.projection_file": beside})
    return dataclasses.replace(config, model=identity).save(out)


def preset_to_fit(name: str, shape: Shape | None = None) -> SwapConfig:
    """A preset's settings; refused if `fit_blocks` makes no projection of its kind."""
    config = SwapConfig.preset(name, shape=shape)
    kind, summary = config.summary.projection, config.summary.kind
    if summary != "low_rank":
        raise ConfigError(
            f"preset {name}: must have projections to be calibrated, has none with "
            f"summary.kind={summary}; use the preset as it is"
        )
    if kind not in FITTED:
        raise ConfigError(
            f"preset {name}: summary.projection must be one of {', '.join(FITTED)} to be "
            f"calibrated without a tuner, has {kind}; `kvswap tune` makes it, and settings with it"
        )
    return config
