"""Projections from text, without a tuner: those that its prompt would make for itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from kvswap_torch.cli.app import app
from kvswap_torch.hf.families import model_parts
from kvswap_torch.projection import from_chunk
from kvswap_torch.projection_file import load_projections
from kvswap_torch.tuning.blocks import FITTED, fit_blocks, fitted_preset
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.samples import Sample
from tests.python.test_rotary import other_model
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference_model"
TOKENS, ASKING = 90, 32  # as many queries as a prompt's newest that choose channels


def sample(seed: int) -> Sample:
    return Sample(prompt(1, TOKENS, seed=seed)["input_ids"][0], TOKENS - ASKING)


def seen_of(model, one: Sample) -> list[Observed]:
    seen: list[Observed] = []
    Calibrator(model).read(one, seen.append)
    return seen


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """But for the signs of columns."""
    torch.testing.assert_close(ours.abs(), theirs.abs(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("heads", ["each", "all"])
@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_of_one_prompt_they_are_those_that_it_makes(family, kind, heads):
    """Skews look at all queries of a prompt, which here are those in focus."""
    model = tiny_model(family, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    found = fit_blocks(model, [sample(1)], kind, 12, heads)
    for pair, seen in zip(found, seen_of(model, sample(1)), strict=True):
        first = TOKENS - ASKING if kind == "skewed" else 0
        keys, query = (each[:, :, first:] for each in (seen.keys, seen.query))
        expected = from_chunk(kind, keys, query, 12, heads=heads)
        for ours, theirs in zip(pair, expected, strict=True):
            close(ours, theirs)


def test_samples_count_together():
    model = tiny_model("llama", num_key_value_heads=1, head_dim=16)
    samples = [sample(seed) for seed in range(3)]
    layers = zip(*(seen_of(model, one) for one in samples), strict=True)
    for (matrix, _), each in zip(
        fit_blocks(model, samples, "pca_per_head", 4), layers, strict=True
    ):
        keys = torch.cat([seen.keys for seen in each], 2)
        close(matrix, from_chunk("pca_per_head", keys, None, 4)[0])
    for (matrix, _), each in zip(
        fit_blocks(model, samples, "skewed", 16),
        zip(*(seen_of(model, one) for one in samples), strict=True),
        strict=True,
    ):
        asked = torch.cat([seen.query[0, :, -ASKING:].flatten(0, 1) for seen in each])
        weighed = (asked @ matrix).abs().sum(0)
        assert torch.equal(weighed.sort(descending=True).values, weighed)
        torch.testing.assert_close(matrix.T @ matrix, torch.eye(16), atol=1e-5, rtol=0)


def test_the_papers_svd_is_of_all_samples_and_all_heads(tmp_path):
    """KVSwap, section 3.2: the right singular vectors of the keys of all heads, side by side."""
    model = tiny_model("llama")
    samples = [sample(seed) for seed in range(3)]
    config = fitted_preset(model, "kvswap-paper", tmp_path / "paper.json", samples)
    assert config.summary.projection == "svd_keys" and config.prefetch.mode == "trust"
    layers = zip(*(seen_of(model, one) for one in samples), strict=True)
    shape = model_parts(model).shape
    made = load_projections(
        config.projection_path, [config.rank] * shape.layers, shape.width, config.model
    )
    for (key, query), each in zip(made, layers, strict=True):
        rows = torch.cat([seen.keys[0].transpose(0, 1).flatten(1) for seen in each])
        close(key, torch.linalg.svd(rows, full_matrices=False).Vh[: config.rank].T)
        assert torch.equal(key, query)


@pytest.mark.parametrize("name", ["loki", "infinigen", "infinigen-star", "think", "kvswap-paper"])
def test_a_presets_config_has_them_beside_it(name, tmp_path):
    model = tiny_model("llama")
    config = fitted_preset(model, name, tmp_path / "made" / f"{name}.json", [sample(1), sample(2)])
    assert SwapConfig.load(config.source) == config
    assert config.projection_file == f"{name}.projection.safetensors"
    parts = model_parts(model)
    made = load_projections(
        config.projection_path,
        [config.rank] * parts.shape.layers,
        parts.shape.width,
        parts.identity,
        config.heads,
    )
    with KVSwapCache(model, tmp_path, config.source) as cache:
        inputs = prompt(2, 30, padding=(0, 7))
        assert torch.equal(greedy(model, inputs, cache, tokens=4), greedy(model, inputs, tokens=4))
        for (key, query), expected in zip(cache.driver._projections, made, strict=True):
            assert torch.equal(key, expected[0]) and torch.equal(query, expected[1])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("quest", "preset quest: must have projections to be calibrated.*summary.kind=min_max"),
        ("snapkv", "has none with summary.kind=none"),
        ("kvswap", "without a tuner, has query_aware; `kvswap tune` makes it"),
        ("qest", "nearest: quest"),
    ],
)
def test_other_presets_are_refused(name, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        fitted_preset(tiny_model("llama"), name, tmp_path / "config.json", [sample(1)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "columns", "heads", "told"),
    [
        ("query_aware", 4, "each", "must be one of pca_per_head, .*`kvswap tune` makes the others"),
        ("channels", 17, "each", "columns: must be 1 to 16, got 17"),
        ("channels", 33, "all", "columns: must be 1 to 32, got 33"),
        ("rope_pairs", 3, "each", "columns: must be 1 to 16, even, got 3"),
    ],
)
def test_what_cannot_be_made_is_refused(kind, columns, heads, told):
    with pytest.raises(ConfigError, match=told):
        fit_blocks(tiny_model("llama"), [sample(1)], kind, columns, heads)
    with pytest.raises(ConfigError, match="samples must be at least one"):
        fit_blocks(tiny_model("llama"), [], "channels", 4)


def test_pairs_of_a_model_that_turns_others_are_refused():
    with pytest.raises(ConfigError, match="which turns other pairs"):
        fit_blocks(other_model("Cohere"), [sample(1)], "rope_pairs", 4)


def test_the_command_writes_both(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {i} says what line {i * i % 97} does not.\n" for i in range(40)))
    given = ["--model", str(REFERENCE), "--path", str(tmp_path), "--calibration", str(text)]
    start = ["calibrate", "--out", str(tmp_path / "loki.json"), *given]
    told = CliRunner().invoke(app, [*start, "--preset", "loki", "--json"])
    assert told.exit_code == 0, told.output
    files = json.loads(told.stdout)
    assert SwapConfig.load(files["config"]).projection_kind == "pca_per_head"
    assert files["projections"] == str(tmp_path / "loki.projection.safetensors")
    with pytest.raises(ConfigError, match="preset quest: must have projections to be calibrated"):
        CliRunner().invoke(app, [*start, "--preset", "quest"], catch_exceptions=False)
    missing = ["--preset", "loki", "--model", "nowhere", "--path", str(tmp_path / "no")]
    with pytest.raises(ConfigError, match="--path: must be a directory on the disk to use"):
        CliRunner().invoke(app, [*start, *missing], catch_exceptions=False)
