"""Config files of earlier versions are read as they were meant, and those of later ones are not.

`config_version_1/first.json` is the first config that a calibration wrote (the reference model's,
by kvswap_torch 0.1.0): fields that came later are missing in it, and it stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from kvswap_torch import SwapConfig
from kvswap_torch.config import CONFIG_VERSION, SETTINGS
from tests.python.test_config_cpp import ask, plain, refusals

FIRST = Path(__file__).parent / "config_version_1" / "first.json"


def test_the_first_file_is_read_by_both() -> None:
    written = json.loads(FIRST.read_text(encoding="utf-8"))
    config = SwapConfig.load(FIRST)
    for name in SETTINGS:
        meant = written.get(name, getattr(SwapConfig(), name))
        assert getattr(config, name) == (tuple(meant) if isinstance(meant, list) else meant), name
    missing = set(SETTINGS) - set(written)
    assert {"score", "rows", "keeper", "heads", "records"} <= missing, "it is of before them"
    (answer,) = ask({"do": "load", "path": str(FIRST)})
    assert answer["ok"]["settings"] == plain(config)
    assert answer["ok"]["model"] == dataclasses.asdict(config.model)
    assert config.projection_path == FIRST.parent / "projection.safetensors"


def test_one_of_a_later_version_is_refused_by_its_version(tmp_path: Path) -> None:
    """Before anything else in it: what it says may mean something else there."""
    later = json.loads(FIRST.read_text(encoding="utf-8"))
    later |= {"version": CONFIG_VERSION + 1, "unheard_of": 1, "rank": "many"}
    path = tmp_path / "later.json"
    path.write_text(json.dumps(later), encoding="utf-8")
    for message in refusals([path])[0]:
        assert f"version must be {CONFIG_VERSION}" in message
        assert f"got {CONFIG_VERSION + 1}" in message
        assert "unheard_of" not in message and "rank" not in message
