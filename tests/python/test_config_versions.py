"""Config files of earlier versions are read as they were meant, and those of later ones are not.

Files of `config_version_1` stay as they are. `first.json` is the first config that a calibration
wrote (the reference model's, by kvswap_torch 0.1.0): fields that came later are missing in it. The
other two have every setting of version 1 at a value other than its default, in their own fields or
in a row of their table; one file cannot, since settings exclude each other.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvswap_torch import ConfigError, SwapConfig
from kvswap_torch.config import CONFIG_VERSION, v1
from kvswap_torch.config.engine import flat_settings
from tests.python.test_config_cpp import ask, plain, refusals

FOLDER = Path(__file__).parent / "config_version_1"
FIRST = FOLDER / "first.json"
LATER = {
    "exclude_from_summary": False,
    "new_group_ratio": None,
}  # what no file of version 1 has, and its value there
EVERY = (FOLDER / "low_rank.json", FOLDER / "others.json")


def meant(written: dict[str, Any], row: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a file's fields, and a row's, mean by version 1's own defaults."""
    theirs = {n: v for n, v in written.items() if n in v1.PATHS}
    said = {**LATER, **v1.DEFAULTS, **theirs, **(row or {})}
    said["look_ahead"] = {True: "trust", False: "off"}[said["look_ahead"]]
    return {name: tuple(v) if isinstance(v, list) else v for name, v in said.items()}


def test_the_first_file_is_read_by_both() -> None:
    written = json.loads(FIRST.read_text(encoding="utf-8"))
    config = SwapConfig.load(FIRST)
    assert flat_settings(config) == meant(written)
    missing = set(v1.PATHS) - set(written)
    assert {"score", "rows", "keeper", "heads", "records"} <= missing, "it is of before them"
    assert config.selection.score == "logit_sum"
    (answer,) = ask({"do": "load", "path": str(FIRST)})
    assert answer["ok"]["settings"] == plain(config)
    assert answer["ok"]["model"] == dataclasses.asdict(config.model)
    assert config.projection_path == FIRST.parent / "projection.safetensors"


def test_version_1s_defaults_are_its_own(tmp_path: Path) -> None:
    """What a file leaves out is not what version 2 makes of it."""
    path = tmp_path / "bare.json"
    path.write_text('{"version": 1}', encoding="utf-8")
    config = SwapConfig.load(path)
    assert flat_settings(config) == meant({})
    assert config.selection.score == "logit_sum"
    (answer,) = ask({"do": "load", "path": str(path)})
    assert answer["ok"]["settings"] == plain(config)


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_setting_of_version_1_is_read_by_both_and_written_as_version_2(
    path: Path, tmp_path: Path
) -> None:
    written = json.loads(path.read_text(encoding="utf-8"))
    config = SwapConfig.load(path)
    assert flat_settings(config) == meant(written)
    for row, solution in zip(written["table"], config.solution_configs, strict=True):
        told = meant(written, row["settings"])
        if told["audit_every"] == 0 and told["missed_mass_max"] is not None:
            told["audit_every"] = v1.AUDIT_INTERVAL  # which is what it meant
        assert flat_settings(solution) == told, row
    for full in (False, True):
        saved = config.save(tmp_path / "second.json", full=full)
        again = SwapConfig.load(tmp_path / "second.json")
        assert again == saved == config
        assert json.loads((tmp_path / "second.json").read_text())["version"] == CONFIG_VERSION
        asked = [{"do": "load", "path": str(each)} for each in (path, tmp_path / "second.json")]
        first, second = ask(*asked)
        assert second == first or path.stem == "low_rank"
        assert first["ok"]["settings"] == second["ok"]["settings"] == plain(config)
        for row, solution in zip(second["ok"]["table"], config.solution_configs, strict=True):
            assert row["settings"] == plain(solution)


def test_the_two_files_have_every_setting_at_another_value_than_its_default() -> None:
    said: set[str] = set()
    for path in EVERY:
        written = json.loads(path.read_text(encoding="utf-8"))
        for fields in (written, *(row["settings"] for row in written["table"])):
            said |= {
                name
                for name, value in fields.items()
                if name in v1.PATHS and value not in (v1.DEFAULTS[name], [v1.DEFAULTS[name]])
            }
    assert said == set(v1.PATHS)


def test_what_has_no_place_in_version_2_is_refused_by_its_old_name(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"version": 1, "keeper": "observed", "keep_slack": 0.5}', encoding="utf-8")
    for message in refusals([path])[0]:
        assert "keep_slack: must be left out where keeper is observed" in message
    with pytest.raises(ConfigError, match=r"low_watermark: is not an option of policy 'snapkv'"):
        SwapConfig(retention={"policy": "snapkv", "low_watermark": 0.5})


def test_one_of_a_later_version_is_refused_by_its_version(tmp_path: Path) -> None:
    """Before anything else in it: what it says may mean something else there."""
    later = json.loads(FIRST.read_text(encoding="utf-8"))
    later |= {"version": CONFIG_VERSION + 1, "unheard_of": 1, "rank": "many"}
    path = tmp_path / "later.json"
    path.write_text(json.dumps(later), encoding="utf-8")
    for message in refusals([path])[0]:
        assert f"version must be 1 or {CONFIG_VERSION}" in message
        assert f"got {CONFIG_VERSION + 1}" in message
        assert "unheard_of" not in message and "rank" not in message
