"""`tune`: the tuner as one call, and how well its config goes on."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.positions import REMEDY, most_positions
from kvswap_torch.tuning.calibration import KINDS
from kvswap_torch.tuning.documents import default_samples, samples_from_files
from kvswap_torch.tuning.pipeline import TuneOptions, find_settings, measure_all, projection_beside
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.recall import Choice
from kvswap_torch.tuning.result import TuneResult
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.settings import FORMATS, check_budget
from kvswap_torch.tuning.solver import SOLVERS
from kvswap_torch.tuning.work import WorkFolder

TOKENS_MAX = 128  # decoded of a sample


def evaluate_config(
    model: Any,
    samples: Sequence[Sample],
    config: SwapConfig,
    path: Path,
    kv_memory_bytes: int,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Decodes the questions and answers of samples token by token.

    Returns
    -------
    dict
        ``accuracy`` and ``accuracy_full``: share of tokens guessed right; ``agreement``: share of
        tokens at which both guess the same; ``loss`` and ``loss_full``, nats a token.
    """
    from transformers import DynamicCache

    from kvswap_torch.hf.cache import KVSwapCache

    full, ours, targets = [], [], []
    for number, sample in enumerate(samples):
        if progress is not None:
            progress("evaluating", number, len(samples))
        ids = sample.ids[: sample.focus + TOKENS_MAX]
        with KVSwapCache(
            model,
            path=path,
            config=config,
            kv_memory_bytes=kv_memory_bytes,
            max_context=len(ids),
            max_batch=1,
        ) as cache:
            ours.append(_decode(model, ids, sample.focus, cache))
        full.append(_decode(model, ids, sample.focus, DynamicCache()))
        targets.append(ids[sample.focus :])
    if progress is not None:
        progress("evaluating", len(samples), len(samples))
    target = torch.cat(targets)
    both = {"": torch.cat(ours), "_full": torch.cat(full)}
    found: dict[str, float] = {"tokens": len(target)}
    for name, logits in both.items():
        found[f"accuracy{name}"] = (logits.argmax(-1) == target).float().mean().item()
        found[f"loss{name}"] = F.cross_entropy(logits, target).item()
    same = both[""].argmax(-1) == both["_full"].argmax(-1)
    found["agreement"] = same.float().mean().item()
    return {name: round(value, 4) for name, value in found.items()}


@torch.inference_mode()
def _decode(model: Any, ids: torch.Tensor, focus: int, cache: Any) -> torch.Tensor:
    """Logits of the tokens from `focus` on, ``[tokens, vocabulary]`` fp32."""
    named = cache_argument(model, cache)
    read = model(input_ids=ids[None, :focus], **named, logits_to_keep=1)
    logits = [read.logits[0, -1]]
    for token in ids[focus:-1]:
        step = model(input_ids=token.view(1, 1), **named, use_cache=True)
        logits.append(step.logits[0, -1])
    return torch.stack(logits).float()


LENGTHS = (4096, 8192)  # of the samples
COUNT = 4

Samples = tuple[Sequence[Sample], Sequence[Sample]]


def tune(
    model: Any,
    max_context_len: int,
    max_batch_size: int,
    kv_memory: int | str,
    path: str | Path,
    *,
    tokenizer: Any = None,
    calibration: Sequence[str | Path] | None = None,
    samples: Samples | None = None,
    options: TuneOptions | None = None,
    work: str | Path | None = None,
    evaluate: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> TuneResult:
    """Finds the best settings for a model on a disk within a memory limit.

    ::

        result = tune(model, 32768, 8, "512MiB", "/fast/disk")
        result.save("config.json")

    Parameters
    ----------
    model
        A transformers model that `kvswap_torch.KVSwapCache` supports.
    max_context_len, max_batch_size
        Tokens of a sequence, at most those that the model was made for, and sequences, to be
        ready for.
    kv_memory
        Limit for everything the cache keeps in memory, bytes or like ``"512MiB"``.
    path
        A folder on the disk to use.
    tokenizer
        Of the model, or where to load it from; default: where the model came from.
    calibration
        Text files to calibrate on; default: text that comes along.
    samples
        Tokens to calibrate on instead: some to fit and others to measure.
    work
        Folder that measurements are kept in; None: they are not kept.
    evaluate
        Also decode held-out questions with the result, next to a full cache.
    progress
        Called with what is being done, how much is done, and of how much.
    tell
        Called with a sentence on how long measuring will take at least, before it starts.

    Raises
    ------
    BudgetError
        When the smallest settings do not fit; names the minimum.
    ConfigError
        For options that make no sense, or text that is too short.
    StorageError
        When the folder is missing, not writable or too full.
    UnsupportedModelError
        When the model's cache cannot live on disk.
    """
    options = options or TuneOptions()
    budget = parse_bytes(kv_memory, "kv_memory")
    _check(max_context_len, max_batch_size, options)
    _check_context(model, max_context_len)
    if model.device.type != "cpu":
        raise ConfigError(
            f"tune: the model must be on the CPU, where it is calibrated and timed, got "
            f"{model.device}; load it with device_map=None"
        )
    options = of_projection(at_length(options, max_context_len))
    if not Path(path).is_dir():
        raise StorageError(errno.ENOENT, "path must be a folder that exists", str(path))
    check_budget(
        model,
        max_context_len,
        max_batch_size,
        budget,
        Path(path),
        options.calibration.choice,
        options.sizes,
        options.records,
    )
    with tempfile.TemporaryDirectory() as scratch:
        drawn: list[Samples] = []

        def draw() -> Samples:
            if not drawn:
                drawn.append(samples or _draw(model, tokenizer, calibration, max_context_len))
            return drawn[0]

        measured = measure_all(
            model,
            max_context_len,
            max_batch_size,
            Path(path),
            draw,
            WorkFolder(work or scratch),
            options,
            _text_key(tokenizer, calibration, samples, _lengths(max_context_len)),
            progress,
            tell,
        )
        found = find_settings(measured, max_context_len, max_batch_size, budget, options)
        config = found.config
        result = TuneResult(
            measured, options, budget, config, found.solved, found.levels, found.ahead
        )
        if evaluate:
            with projection_beside(config, measured.calibrated) as ready:
                scores = evaluate_config(model, draw()[1], ready, Path(path), budget, progress)
            result = dataclasses.replace(result, evaluation=scores)
        return result


def at_length(options: TuneOptions, context: int) -> TuneOptions:
    """With as many groups as such a context wants, where no choice was given.

    As without a config (`kvswap_torch.hf.settings.default_config`).
    """
    from kvswap_torch import _C

    given = options.calibration.choice
    if given != Choice():
        return options
    wanted = dataclasses.replace(given, groups_max=given.groups_max * _C.length_factor(context))
    calibration = dataclasses.replace(options.calibration, choice=wanted)
    return dataclasses.replace(options, calibration=calibration)


def of_projection(options: TuneOptions) -> TuneOptions:
    """With the projection that was asked for as the first of the kinds to calibrate."""
    wanted = options.projection
    if not wanted:
        return options
    kinds = (wanted, *(kind for kind in options.calibration.kinds if kind != wanted))
    calibration = dataclasses.replace(options.calibration, kinds=kinds)
    return dataclasses.replace(options, calibration=calibration)


def _check(max_context_len: int, max_batch_size: int, options: TuneOptions) -> None:
    for name, value, least in (
        ("max_context_len", max_context_len, 1024),
        ("max_batch_size", max_batch_size, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"tune: {name} must be an int of at least {least}, got {value!r}")
    if options.solver not in SOLVERS:
        raise ConfigError(
            f"tune: solver must be one of {', '.join(SOLVERS)}, got {options.solver!r}"
        )
    if options.records not in FORMATS:
        raise ConfigError(
            f"tune: records must be one of {', '.join(FORMATS)}, got {options.records!r}"
        )
    if options.projection not in ("", *KINDS):
        raise ConfigError(
            f"tune: projection must be one of {', '.join(KINDS)}, got {options.projection!r}; "
            "`kvswap calibrate` makes the projections of other presets"
        )
    for name in ("min_recall", "exposed_share"):
        if not 0 <= getattr(options, name) <= 1:
            raise ConfigError(f"tune: {name} must be 0 to 1, got {getattr(options, name)}")


def _check_context(model: Any, context: int) -> None:
    most = most_positions(model.config.get_text_config())
    if most is not None and context > most:
        raise ConfigError(
            f"tune: max_context_len must be at most the {most:,} tokens that this model was made "
            f"for, got {context:,}; or {REMEDY}"
        )


def _draw(
    model: Any, tokenizer: Any, calibration: Sequence[str | Path] | None, context: int
) -> Samples:
    if tokenizer is None:
        tokenizer = getattr(model.config, "_name_or_path", "") or None
    if tokenizer is None:
        raise ConfigError(
            "tune: tokenizer must be given for a model that was not loaded from a folder, got "
            "none; pass tokenizer=, or samples="
        )
    if isinstance(tokenizer, str | Path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    lengths = _lengths(context)
    if calibration:
        return samples_from_files(tokenizer, calibration, lengths, count=COUNT)
    return default_samples(tokenizer, lengths, count=COUNT)


def held_out_samples(
    model: Any, tokenizer: Any, calibration: Sequence[str | Path] | None, context: int
) -> Sequence[Sample]:
    """Text that is only measured on, no longer than the context and the model allow.

    Raises
    ------
    ConfigError
        As `tune`: for a context that the model was not made for, or text that is too short.
    """
    _check_context(model, context)
    return _draw(model, tokenizer, calibration, min(context, LENGTHS[0]))[1]


def _lengths(context: int) -> tuple[int, ...]:
    """Tokens of the samples that are drawn."""
    return tuple(dict.fromkeys(min(length, context) for length in LENGTHS))


def _text_key(
    tokenizer: Any,
    calibration: Sequence[str | Path] | None,
    samples: Samples | None,
    lengths: tuple[int, ...],
) -> str:
    """What tells one calibration text, as the model's tokens, from another."""
    digest = hashlib.sha256()
    if samples is None:
        named = tokenizer if isinstance(tokenizer, str | Path | None) else tokenizer.name_or_path
        digest.update(f"{named} {lengths}".encode())
    for path in calibration or ():
        try:
            digest.update(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"tune: calibration file {path} must be readable: {error}") from error
    for side in samples or ():
        for sample in side:
            digest.update(sample.ids.numpy().tobytes() + str(sample.focus).encode())
    return digest.hexdigest()[:16]
