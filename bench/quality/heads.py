"""Heads files of the models that presets are measured on: made once, and kept with the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.machine import RESULTS
from kvswap_torch.config import ModelIdentity
from kvswap_torch.errors import ConfigError
from kvswap_torch.heads_file import read_heads

FOLDER = RESULTS / "heads"  # by `kvswap calibrate --preset compresskv`


def stored_heads(model: ModelIdentity, folder: Path = FOLDER) -> dict[str, Any]:
    """Settings from the file that was made for a model.

    Raises
    ------
    ConfigError
        There is none.
    """
    for path in sorted(folder.glob("*.heads.json")):
        if not model.differences(ModelIdentity(**json.loads(path.read_text())["model"])):
            return read_heads(path)
    raise ConfigError(
        f"heads: {folder} must have a heads file of this model; `kvswap calibrate --preset "
        f"compresskv --model DIR --out {folder}/NAME.json` makes it"
    )
