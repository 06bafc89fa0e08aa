"""The saved caches in tests/python/saved_version_1, which every later version has to read.

``python -m tests.python.saved_files`` wrote them. They stay as they are; a new version gets a
folder of its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch

from kvswap_torch import KVSwapCache, SwapConfig
from tests.python.tiny_models import COVERING, TIGHT, greedy, prompt, tiny_model

VERSION_1 = Path(__file__).parent / "saved_version_1"
PADDING = {"covering": (), "choosing": (0, 7)}
FAMILY = {"covering": "llama", "choosing": "gemma3"}


def config_of(name: str) -> SwapConfig:
    return COVERING if name == "covering" else TIGHT


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    padding = PADDING[name]
    return prompt(len(padding) or 1, 40, padding=padding)


def write(folder: Path) -> None:
    """One cache that attends to all, one that chooses, with padding and layers not on disk."""
    torch.set_num_threads(1)
    for name, family in FAMILY.items():
        model = tiny_model(family)
        with tempfile.TemporaryDirectory() as disk, KVSwapCache(model, disk, config_of(name)) as c:
            out = greedy(model, inputs_of(name), c, tokens=4)
            shutil.rmtree(folder / name, ignore_errors=True)
            c.save(folder / name)
            (folder / f"{name}.json").write_text(json.dumps(out.tolist()) + "\n")


if __name__ == "__main__":
    write(VERSION_1)
