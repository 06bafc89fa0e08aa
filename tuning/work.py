"""The folder that the tuner keeps its measurements in, so that nothing is measured twice."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvswap_torch.config import ModelIdentity, SwapConfig
from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.projection import Pair
from kvswap_torch.tuning.calibration import Calibration
from kvswap_torch.tuning.choices import Choices, Recorded
from kvswap_torch.tuning.costs import layers_ahead
from kvswap_torch.tuning.settings import prediction_losses, true_query_layers
from kvswap_torch.version import __version__
from kvswap_torch.whole_file import replace_text

FINGERPRINT_ELEMENTS = 4096  # of each parameter


class WorkFolder:
    """Measurements by name, each with the key of what it was made of.

    A file of another key is as good as none: it is made again and replaced. Files are written whole
    or not at all.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"work folder must be a folder to write to: {error.strerror}",
                str(folder),
            ) from error

    def load(self, name: str, key: str) -> Any | None:
        """What was saved under this name and key; None where that is not there."""
        path = self.folder / f"{name}.json"
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return None  # damaged: measured again, and replaced
        if not isinstance(found, dict) or found.get("key") != key:
            return None
        return found["data"]

    def save(self, name: str, key: str, data: Any) -> None:
        """Replaces what was there."""
        date = datetime.date.today().isoformat()
        text = json.dumps({"key": key, "date": date, "data": data}, indent=1) + "\n"
        replace_text(self.folder / f"{name}.json", text)

    def date(self, name: str) -> str | None:
        """When it was measured."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text()).get("date")
        except (OSError, ValueError):
            return None


def make_key(*parts: Any) -> str:
    """A digest of plain values, and of the version of this tool."""
    text = json.dumps([__version__, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(model: Any) -> str:
    """A digest of a model's config and of a part of every parameter."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, parameter in sorted(model.named_parameters()):
        part = parameter.detach().flatten()[:FINGERPRINT_ELEMENTS].cpu()
        digest.update(name.encode())
        digest.update(str(tuple(parameter.shape)).encode())
        digest.update(part.view(torch.uint8).numpy().tobytes() if part.numel() else b"")
    return digest.hexdigest()[:16]


def machine_key(path: str | Path) -> list[Any]:
    """What timings depend on beside model and settings: processors, threads, and the disk."""
    cpu = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        cpu = next(names, "").split(":")[-1].strip()
    return [cpu, os.cpu_count(), torch.get_num_threads(), os.stat(path).st_dev]


INT8_LOSS_MAX = 0.002  # of recall; within it int8 rows serve twice the rank for the same bytes
INT4_COLUMNS = 1.5  # for one of int8's: projections and scales take no less for them


@dataclass(frozen=True)
class Calibrated:
    """Projections and what they find.

    Parameters
    ----------
    kind
        Of the projection.
    pairs
        One projection a layer on disk, for its true query.
    predicted_pairs
        The same for the query as the layer before predicts it.
    true_query_layers
        Layers whose predictions must not be trusted.
    losses
        For each layer, rank -> worth that is lost where a predicted query selects.
    summary_dtype
        As in `SwapConfig`.
    recall
        By (kind, query), with the summary in the model's dtype: for each layer, rank -> recall.
    energy
        For each layer the share of the scores' variance that the first r columns keep.
    tokens_fitted, tokens_measured
        How much text it rests on.
    choices
        Of the same projections; see `kvswap_torch.tuning.choices`.
    """

    identity: ModelIdentity
    kind: str
    pairs: list[Pair]
    predicted_pairs: list[Pair]
    true_query_layers: tuple[int, ...]
    losses: list[dict[int, float]]
    summary_dtype: str
    recall: dict[tuple[str, str], list[dict[int, float]]]
    energy: list[list[float]]
    tokens_fitted: int
    tokens_measured: int
    warnings: tuple[str, ...]
    choices: Choices

    @property
    def layers(self) -> int:
        """Layers on disk."""
        return len(self.pairs)

    def pairs_for(self, config: SwapConfig) -> list[Pair]:
        """For each layer the projection that is made for the query it selects with."""
        if config.prefetch.mode != "trust":
            return self.pairs
        trusted = set(layers_ahead(config, self.layers))
        return [
            (self.predicted_pairs if layer in trusted else self.pairs)[layer]
            for layer in range(self.layers)
        ]

    @property
    def summary_words(self) -> str:
        """The summary's precision, to be shown."""
        return "the model's dtype" if self.summary_dtype == "model" else self.summary_dtype


def pick_summary_dtype(calibration: Calibration) -> str:
    """int8 where it finds as much as the model's dtype at the same rank; int4 where it finds more.

    That is, at `INT4_COLUMNS` times int8's columns, where both were measured.
    """
    tables = {
        dtype: calibration.tables[calibration.kind, dtype, "true"].worth()
        for dtype in calibration.summary_dtypes
    }

    def mean(dtype: str, ranks: list[int]) -> float:
        return sum(layer[r] for layer in tables[dtype] for r in ranks) / len(ranks)

    ranks = list(tables["model"][0])
    loss_max = INT8_LOSS_MAX * len(tables["model"])
    if mean("int8", ranks) < mean("model", ranks) - loss_max:
        return "model"
    few = [rank for rank in ranks if INT4_COLUMNS * rank in ranks]
    more = [round(INT4_COLUMNS * rank) for rank in few]
    is_worth_it = few and "int4" in tables and mean("int4", more) > mean("int8", few)
    return "int4" if is_worth_it else "int8"


def from_calibration(calibration: Calibration, choices: Choices) -> Calibrated:
    """What is kept of it."""
    return Calibrated(
        identity=calibration.identity,
        kind=calibration.kind,
        pairs=calibration.pairs[calibration.kind, "true"],
        predicted_pairs=calibration.pairs[calibration.kind, "predicted"],
        true_query_layers=true_query_layers(calibration),
        losses=prediction_losses(calibration),
        summary_dtype=pick_summary_dtype(calibration),
        recall={
            (kind, query): table.recall()
            for (kind, dtype, query), table in calibration.tables.items()
            if dtype == "model"
        },
        energy=calibration.energy,
        tokens_fitted=calibration.tokens_fitted,
        tokens_measured=calibration.tokens_measured,
        warnings=calibration.warnings,
        choices=choices,
    )


def save_calibrated(path: Path, calibrated: Calibrated, key: str) -> None:
    """Writes everything to one safetensors file; `key` identifies what it was made of."""
    tensors = {}
    for name in ("pairs", "predicted_pairs"):
        for layer, (keys, queries) in enumerate(getattr(calibrated, name)):
            tensors[f"{name}.{layer}.key"] = keys.float().clone().contiguous()
            tensors[f"{name}.{layer}.query"] = queries.float().clone().contiguous()
    choices = calibrated.choices
    for name, recorded in (("choices", choices.recorded), ("ahead", choices.ahead)):
        for group, samples in recorded.items():
            for number, sample in enumerate(samples):
                for layer, rows in enumerate(sample.layers):
                    tensors[f"{name}.{group}.{number}.{layer}"] = rows.contiguous()
    plain: dict[str, Any] = {
        "identity": dataclasses.asdict(calibrated.identity),
        "recall": [[*name, _tables(tables)] for name, tables in calibrated.recall.items()],
        "losses": _tables(calibrated.losses),
        "choices": {
            "tokens": choices.tokens,
            "rank": choices.rank,
            "recall": [[group, _tables(tables)] for group, tables in choices.recall.items()],
            "fewer": [
                [tokens, [[group, _tables(tables)] for group, tables in sizes.items()]]
                for tokens, sizes in choices.fewer.items()
            ],
            "best": [[group, values] for group, values in choices.best.items()],
            "contexts": [
                [g, [s.context for s in samples]] for g, samples in choices.recorded.items()
            ],
        },
    }
    for name in ("kind", "true_query_layers", "summary_dtype", "energy", "warnings"):
        plain[name] = getattr(calibrated, name)
    for name in ("tokens_fitted", "tokens_measured"):
        plain[name] = getattr(calibrated, name)
    partial = path.with_suffix(".partial")
    save_file(tensors, str(partial), metadata={"key": key, "calibrated": json.dumps(plain)})
    partial.replace(path)


def _tables(tables: list[dict[int, float]]) -> list[list[list[float]]]:
    return [[[rank, value] for rank, value in layer.items()] for layer in tables]


def _untabled(tables: list[list[list[float]]]) -> list[dict[int, float]]:
    return [{int(rank): value for rank, value in layer} for layer in tables]


def is_calibrated(path: Path, key: str) -> bool:
    """Is that what `load_calibrated` would find there? A damaged file is none."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get("key") == key
    except (SafetensorError, OSError):
        return False


def load_calibrated(path: Path, key: str) -> Calibrated | None:
    """What `save_calibrated` wrote; None when there is none, or it was made of something else.

    Raises
    ------
    ConfigError
        When the file is damaged; names it.
    """
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _calibrated(json.loads(metadata["calibrated"]), tensors)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"calibration {path}: must be a file that the tuner wrote, got {error}; delete it, and "
            "the model is calibrated again"
        ) from error


def _calibrated(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Calibrated:
    layers = len(plain["energy"])
    given = plain["choices"]

    def recorded(name: str) -> dict[int, list[Recorded]]:
        return {
            group: [
                Recorded(
                    context,
                    tuple(tensors[f"{name}.{group}.{number}.{layer}"] for layer in range(layers)),
                )
                for number, context in enumerate(contexts)
            ]
            for group, contexts in given["contexts"]
        }

    def pairs(name: str) -> list[Pair]:
        return [
            (tensors[f"{name}.{layer}.key"], tensors[f"{name}.{layer}.query"])
            for layer in range(layers)
        ]

    choices = Choices(
        tokens=given["tokens"],
        rank=given["rank"],
        recall={group: _untabled(tables) for group, tables in given["recall"]},
        best=dict(given["best"]),
        recorded=recorded("choices"),
        ahead=recorded("ahead"),
        fewer={
            tokens: {group: _untabled(tables) for group, tables in sizes}
            for tokens, sizes in given["fewer"]
        },
    )
    return Calibrated(
        identity=ModelIdentity(**plain["identity"]),
        kind=plain["kind"],
        pairs=pairs("pairs"),
        predicted_pairs=pairs("predicted_pairs"),
        true_query_layers=tuple(plain["true_query_layers"]),
        losses=_untabled(plain["losses"]),
        summary_dtype=plain["summary_dtype"],
        recall={(kind, query): _untabled(tables) for kind, query, tables in plain["recall"]},
        energy=plain["energy"],
        tokens_fitted=plain["tokens_fitted"],
        tokens_measured=plain["tokens_measured"],
        warnings=tuple(plain["warnings"]),
        choices=choices,
    )
