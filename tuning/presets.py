"""The tuner for presets: every point of a method's own grid, decoded with, and the best that fits.

A grid is small, so nothing is extrapolated but memory, which is the engine's own count for the
batch and context that are asked for. Time, reads and recall are those of held-out text, decoded
token by token on the disk itself, or on a modelled device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.config import Audit, SwapConfig
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.preset.grid import Grid, grid_of
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.settings import Demand, engine_need
from kvswap_torch.tuning.solver import RECALL_LOSS_MAX, SPEED_LOSS_MAX
from kvswap_torch.version import __version__

STEPS_MAX = 48  # decoded of a sample
WARM_UP = 4  # of these, which are slower
AUDIT = Audit(interval=16)


@dataclass(frozen=True)
class Tried:
    """A point that was decoded with.

    Parameters
    ----------
    point
        In the method's own words: name of an axis -> value.
    memory_bytes
        At the batch and context that were asked for.
    recall
        Attention mass held, mean over heads and layers; None where nothing is selected.
    agreement
        Share of tokens that are the full cache's next.
    step_ms, bytes_per_token
        Medians over decoding steps of one sequence.
    """

    point: dict[str, Any]
    config: SwapConfig
    memory_bytes: int
    recall: float | None
    agreement: float
    step_ms: float
    bytes_per_token: float

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        del fields["config"]
        return fields


@dataclass(frozen=True)
class PresetTuned:
    """What was tried of a preset, the chosen one among it.

    Parameters
    ----------
    measure
        What was not to be lost: ``recall`` where all have it, else ``agreement``.
    tokens
        Of the longest sample: what times and recall were measured at.
    """

    preset: str
    batch: int
    context: int
    budget_bytes: int
    tokens: int
    device: str
    measure: str
    tried: tuple[Tried, ...]
    chosen: Tried

    def save(self, path: str | Path) -> SwapConfig:
        """Writes the chosen settings, and all that was tried as their provenance."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        provenance = {
            "tool": f"kvswap_torch {__version__} tuner",
            "preset": self.preset,
            "batch": self.batch,
            "context": self.context,
            "budget_bytes": self.budget_bytes,
            "measured_tokens": self.tokens,
            "device": self.device or "the disk as it is",
            "tried": [each.to_json() for each in self.tried],
        }
        config = dataclasses.replace(self.chosen.config, provenance=provenance, source=None)
        return config.save(path)

    def lines(self) -> list[str]:
        """A line for each point, the chosen one marked."""
        found = []
        for each in self.tried:
            words = ", ".join(f"{name} {value}" for name, value in each.point.items())
            recall = "" if each.recall is None else f"recall {each.recall:.3f}, "
            found.append(
                f"{'*' if each is self.chosen else ' '} {words}: {recall}agreement "
                f"{each.agreement:.3f}, {each.step_ms:.1f} ms a step, "
                f"{format_bytes(round(each.bytes_per_token))} read, "
                f"{format_bytes(each.memory_bytes)} in memory"
            )
        return found


def tune_preset(
    model: Any,
    name: str,
    max_context_len: int,
    max_batch_size: int,
    budget_bytes: int,
    path: Path,
    samples: Sequence[Sample],
    *,
    device: str = "",
    grid: Grid | None = None,
    progress: Progress | None = None,
) -> PresetTuned:
    """Searches a preset's own settings within a memory limit.

    Parameters
    ----------
    samples
        Held-out text, at least one; its last `STEPS_MAX` tokens at most are decoded.
    device
        A modelled one (``nvme``, ``ufs``, ``emmc``) to measure on; empty: the disk as it is.
    grid
        In the place of the preset's own.

    Raises
    ------
    BudgetError
        When no point fits; names the smallest.
    ConfigError
        For a preset without settings of its own, or no samples.
    """
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.session import alignment_bytes

    grid = grid or grid_of(name)
    if not samples:
        raise ConfigError(f"preset {name}: samples must be at least one, got none")
    alignment = alignment_bytes(path)
    parts = model_parts(model)
    identity, shape = parts.identity, parts.preset_shape(alignment)
    need = engine_need(model, Demand(max_context_len, max_batch_size, budget_bytes), alignment)
    points = []
    for point, settings in grid.points(shape):
        config = SwapConfig.preset(name, settings, shape=shape, model=identity)
        points.append((point, config, need(config)["total"]))
    fitting = [each for each in points if each[2] <= budget_bytes]
    if not fitting:
        least, smallest, _ = min(points, key=lambda each: each[2])
        bytes_least = need(smallest)["least"]  # buffers grow with a budget
        raise BudgetError(
            f"preset {name}: must have at least {bytes_least} bytes ({format_bytes(bytes_least)}) "
            f"for its smallest settings ({least}), got {budget_bytes} "
            f"({format_bytes(budget_bytes)}); raise the budget, or lower context or batch"
        )
    cut = [dataclasses.replace(each, ids=each.ids[: each.focus + STEPS_MAX]) for each in samples]
    wanted = [_full(model, sample) for sample in cut]
    tried = []
    for number, (point, config, memory) in enumerate(fitting):
        if progress is not None:
            progress("decoding with settings", number, len(fitting))
        tried.append(_try(model, config, path, cut, wanted, device, (point, memory)))
    if progress is not None:
        progress("decoding with settings", len(fitting), len(fitting))
    measure, chosen = choose(tried)
    return PresetTuned(
        name,
        max_batch_size,
        max_context_len,
        budget_bytes,
        max(len(each.ids) for each in cut),
        device,
        measure,
        tuple(tried),
        chosen,
    )


def choose(tried: Sequence[Tried]) -> tuple[str, Tried]:
    """The fastest of those that lose at most a hundredth of the best.

    Of those within 2 % of it the one that finds most, then the one in least memory.
    """
    measure = "agreement" if any(each.recall is None for each in tried) else "recall"
    best = max(getattr(each, measure) for each in tried)
    good = [each for each in tried if getattr(each, measure) >= best - RECALL_LOSS_MAX]
    limit = min(each.step_ms for each in good) * (1 + SPEED_LOSS_MAX)
    fast = [each for each in good if each.step_ms <= limit]
    return measure, min(
        fast, key=lambda each: (-getattr(each, measure), each.memory_bytes, each.step_ms)
    )


@torch.inference_mode()
def _full(model: Any, sample: Sample) -> torch.Tensor:
    """The full cache's next tokens from the focus on."""
    count = len(sample.ids) - sample.focus
    return model(input_ids=sample.ids[None, :-1], logits_to_keep=count).logits[0].argmax(-1)


def _try(
    model: Any,
    config: SwapConfig,
    path: Path,
    samples: Sequence[Sample],
    wanted: Sequence[torch.Tensor],
    device: str,
    known: tuple[dict[str, Any], int],
) -> Tried:
    from kvswap_torch.hf.cache import KVSwapCache

    selects = config.summary.kind != "none"
    measured = dataclasses.replace(config, audit=AUDIT if selects else None)
    measured = measured.with_settings({"storage.simulated_device": device or None})
    seconds: list[float] = []
    read: list[float] = []
    missed: list[float] = []
    same: list[torch.Tensor] = []
    for sample, expected in zip(samples, wanted, strict=True):
        with KVSwapCache(
            model, path=path, config=measured, max_context=len(sample.ids), max_batch=1
        ) as cache:
            same.append(_decode(model, sample, cache, seconds, read) == expected)
            lost = cache.stats().missed_mass
            missed += [] if lost is None else [lost]
    return Tried(
        point=known[0],
        config=config,
        memory_bytes=known[1],
        recall=round(1 - sum(missed) / len(missed), 4) if missed else None,
        agreement=round(torch.cat(same).float().mean().item(), 4),
        step_ms=round(1e3 * median(seconds), 3),
        bytes_per_token=median(read),
    )


@torch.inference_mode()
def _decode(
    model: Any, sample: Sample, cache: Any, seconds: list[float], read: list[float]
) -> torch.Tensor:
    """Next tokens from the focus on; adds each step's time and bytes."""
    named = cache_argument(model, cache)
    first = model(input_ids=sample.ids[None, : sample.focus], **named, logits_to_keep=1)
    tokens = [first.logits[0, -1].argmax()]
    for number, token in enumerate(sample.ids[sample.focus : -1]):
        before, began = cache.stats().bytes_read, time.perf_counter()
        step = model(input_ids=token.view(1, 1), **named, use_cache=True)
        took = time.perf_counter() - began
        tokens.append(step.logits[0, -1].argmax())
        if number >= WARM_UP:
            seconds.append(took)
            read.append(cache.stats().bytes_read - before)
    return torch.stack(tokens)
