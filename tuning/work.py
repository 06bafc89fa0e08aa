"""The folder that the tuner keeps its measurements in, so that nothing is measured twice."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from kvswap_torch.errors import StorageError
from kvswap_torch.version import __version__

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
        partial = self.folder / f"{name}.json.partial"
        date = datetime.date.today().isoformat()
        partial.write_text(json.dumps({"key": key, "date": date, "data": data}, indent=1) + "\n")
        partial.replace(self.folder / f"{name}.json")

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
