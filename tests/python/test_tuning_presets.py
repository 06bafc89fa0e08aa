"""`kvswap tune --preset`: grids that their presets take, and the best point that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from python.tiny_models import has_native
from typer.testing import CliRunner

from kvswap_torch import BudgetError, ConfigError, KVSwapCache, SwapConfig, presets
from kvswap_torch.hf.families import model_parts
from kvswap_torch.preset.definition import Shape
from kvswap_torch.preset.grid import GRIDS, NO_GRIDS, Grid, grid_of
from kvswap_torch.tuning.presets import PresetTuned, Tried, choose, tune_preset
from kvswap_torch.tuning.samples import Sample

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference_model"
SHAPES = (Shape(), Shape(layers=6, kv_heads=4, head_dim=64), Shape(layers=3, head_dim=16))


def test_every_preset_has_a_grid_or_says_why_not():
    names = {preset.name for preset in presets()}
    assert not set(GRIDS) & set(NO_GRIDS) and set(GRIDS) | set(NO_GRIDS) == names
    for name, reason in NO_GRIDS.items():
        with pytest.raises(ConfigError, match="must have settings of its own to be tuned") as told:
            grid_of(name)
        assert str(told.value).endswith(reason)
    with pytest.raises(ConfigError, match="preset: must be one of"):
        grid_of("ques")


@pytest.mark.parametrize("name", GRIDS)
def test_every_point_is_a_config_of_its_preset(name):
    for shape in SHAPES:
        points = list(GRIDS[name].points(shape))
        made = [SwapConfig.preset(name, settings, shape=shape) for _, settings in points]
        assert len(points) > 1 and len(set(made)) == len(made), "points differ in their settings"


def tried(step_ms: float, recall: float | None, agreement: float = 0.9, memory: int = 1) -> Tried:
    return Tried({}, SwapConfig(), memory, recall, agreement, step_ms, 0.0)


def test_the_fastest_that_loses_little_is_chosen():
    slow, fast, blind = tried(9, 0.95), tried(5, 0.945), tried(1, 0.8)
    assert choose([slow, fast, blind]) == ("recall", fast)
    # Within 2 % of the fastest it is the one that finds most, then that in least memory.
    more, less = tried(5.05, 0.95, memory=3), tried(5.09, 0.95, memory=2)
    assert choose([fast, more, less]) == ("recall", less)
    # What has no recall is compared by answers.
    assert choose([tried(1, None, 0.5), tried(3, None, 0.9)]) == ("agreement", tried(3, None, 0.9))


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(100, 2000, (600,), generator=generator)
    ids[560:] = ids[200:240].clone()
    return [Sample(ids, 580)]


SMALL = {
    "quest": ({"page": (16,), "tokens": (64, 256)}, {"page": 16, "tokens": 64}),
    "snapkv": ({"tokens": (64, 256), "window": (16,)}, {"tokens": 64, "window": 16}),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_presets_own_settings_are_searched(name, model, tmp_path):
    axes, _ = SMALL[name]
    small = Grid(axes, GRIDS[name].settings)
    found = tune_preset(model, name, 4096, 1, 64 << 20, tmp_path, samples(), grid=small)
    assert isinstance(found, PresetTuned) and found.chosen in found.tried
    assert len(found.tried) == 2
    less, more = found.tried
    assert less.memory_bytes < more.memory_bytes <= 64 << 20
    assert found.measure == ("recall" if name == "quest" else "agreement")
    if name == "quest":
        assert 0 < less.recall <= more.recall <= 1
        assert less.bytes_per_token > 0
    else:
        assert less.recall is None and less.bytes_per_token == 0, "nothing is read while decoding"
    saved = found.save(tmp_path / "config.json")
    told = json.loads((tmp_path / "config.json").read_text())["provenance"]
    assert told["preset"] == name and len(told["tried"]) == 2
    assert saved.audit is None and saved.model == model_parts(model).identity
    with KVSwapCache(model, path=tmp_path, config=tmp_path / "config.json") as cache:
        ids = samples()[0].ids[None, :400]
        out = model.generate(ids, max_new_tokens=2, do_sample=False, past_key_values=cache)
        assert out.shape == (1, 402)


@pytest.mark.parametrize("name", GRIDS)
def test_every_preset_with_a_grid_is_decoded_with(name, model, tmp_path):
    """One point of each, the smallest of every axis; recall where groups are selected."""
    shape = Shape.of(model_parts(model).identity)
    axes = GRIDS[name].axes.items()
    first = {axis: (each(shape) if callable(each) else each)[:1] for axis, each in axes}
    small = Grid(first, GRIDS[name].settings)
    found = tune_preset(model, name, 2048, 1, 1 << 28, tmp_path, samples(), grid=small)
    assert 0 <= found.chosen.agreement <= 1 and found.chosen.step_ms > 0
    assert (found.chosen.recall is None) == (found.chosen.config.summary.kind == "none")
    (line,) = found.lines()
    assert line.startswith("* ") and all(axis in line for axis, _ in axes)


def test_the_memory_that_counts_is_that_of_the_context_asked_for(model, tmp_path):
    axes, smallest = SMALL["quest"]
    small = Grid(axes, GRIDS["quest"].settings)
    needed = "preset quest: must have at least .* smallest settings"
    with pytest.raises(BudgetError, match=needed) as told:
        tune_preset(model, "quest", 4096, 1, 1 << 16, tmp_path, samples(), grid=small)
    assert str(smallest) in str(told.value)
    need = int(str(told.value).split("at least ")[1].split(" ")[0])
    found = tune_preset(model, "quest", 4096, 1, need, tmp_path, samples(), grid=small)
    assert [each.point for each in found.tried] == [smallest]


def test_no_samples_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="samples must be at least one"):
        tune_preset(model, "quest", 4096, 1, 1 << 30, tmp_path, [])


def test_the_command_line_says_what_has_no_settings_of_its_own(tmp_path):
    """Before a model is loaded."""
    from kvswap_torch.tuning.cli import app

    common = ["--model", "/nowhere", "--path", str(tmp_path), "--kv-memory", "1MiB"]
    done = CliRunner().invoke(app, [*common, "--preset", "exact"])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "preset exact: must have settings of its own to be tuned" in done.stderr
    mixed = CliRunner().invoke(app, [*common, "--preset", "quest", "--solver", "greedy"])
    assert mixed.exit_code == 1 and "--solver" in mixed.stderr and "--preset" in mixed.stderr
