"""Presets at the ends of their settings: where one is another, or a rule of a line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvswap_torch
from kvswap_torch import _C, KVSwapCache, SwapConfig
from kvswap_torch.cli.app import app
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.session import alignment_bytes
from kvswap_torch.preset.definition import Preset
from kvswap_torch.sizing import native_options
from tests.oracles import models
from tests.python.test_dropping import NAMES as DROPPING
from tests.python.test_dropping import few
from tests.python.test_oracles import FAR, Layer, attended, chosen, layers_of, preset
from tests.python.test_presets_generate import model_of, small
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
PAGE = (Path(__file__).parents[2] / "docs" / "presets.md").read_text(encoding="utf-8")
ROWS = PAGE.split("## Which one")[1].split("## What they are made of")[0]


def test_ratios_of_one_make_arkv_origin_of_arkv(tmp_path):
    """Roots so high that layers do not differ any more; by low ones some have more, in e4m3."""
    model = model_of(2)
    inputs, told = prompt(2, 90, padding=(0, 7)), []
    for name, changes in (
        ("arkv-origin", {}),
        ("arkv", {"keep_temperatures": (1e6,) * 3}),
        ("arkv", {"keep_temperatures": (0.1,) * 3}),
    ):
        config = few(name, model, **changes)
        with KVSwapCache(model, tmp_path, config) as cache:
            out = greedy(model, inputs, cache, tokens=40)
            told.append((out.tolist(), cache.stats().tokens_kept))
    assert told[0] == told[1]
    assert told[2][1] > told[1][1]


def test_h2o_with_one_heavy_token_is_a_window_and_that_token(tmp_path):
    """Fewer than one it cannot keep; with the first one paid most it is StreamingLLM."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 160, models.HEAD_DIM, generator=generator)
    query = torch.randn(1, 4, 160, models.HEAD_DIM, generator=generator)
    keys[:, :, 0], query[..., 0] = 0, 8
    keys[:, :, 0, 0] = 8
    layers, newest = [Layer(query, keys)] * models.LAYERS, list(range(128, 160))
    heavy = preset("h2o", 2, keep_tokens=1, tail_tokens=32)
    assert attended(tmp_path, heavy, layers) == [[[0, *newest]] * 2] * 2
    window = preset("window", 2, tail_tokens=32)
    assert attended(tmp_path, window, layers) == [[newest] * 2] * 2
    streaming = preset("streaming", 2, group_tokens=1, tail_tokens=32, sink_tokens=1)
    assert attended(tmp_path, streaming, layers) == [[[0, *newest]] * 2] * 2


@pytest.mark.parametrize("model", ["llama-mha", "qwen3-gqa"])
@pytest.mark.parametrize("name", ["loki", "infinigen", "think"])
def test_all_columns_of_single_tokens_are_the_exact_top_k(name, model, tmp_path):
    layers, most = layers_of(model, 160), 24
    kv_heads = layers[0].keys.shape[1]
    changes = {"group_tokens": 1, "groups_max": most, "rank": models.HEAD_DIM}
    found = chosen(tmp_path, preset(name, kv_heads, **changes), layers)
    for (query, keys), heads in zip(layers, found, strict=True):
        asked = query[0, :, -1].unflatten(0, (kv_heads, -1)).sum(1)
        products = torch.einsum("hd,htd->ht", asked.double(), keys[0, :, :FAR].double())
        assert heads == products.topk(most).indices.sort().values.tolist()


@pytest.mark.parametrize("name", DROPPING)
def test_what_is_resident_is_what_the_config_says(name):
    """Of kept tokens, pages and buffers, whatever the prompt is long."""
    model, tokens = tiny_model("llama", max_position_embeddings=4096), 700
    config = few(name, model)
    with KVSwapCache(model, config=config) as cache, torch.no_grad():
        model(**prompt(1, tokens), past_key_values=cache, logits_to_keep=1)
        model(prompt(1, 1)["input_ids"], past_key_values=cache)
        ledger = cache.stats().ledger
    options = native_options(config, model_parts(model).shape, dtype=torch.float32, ranks=[])
    need = _C.memory_need(options, 1, tokens + 1, alignment_bytes(None))
    for use, held in ledger.items():
        assert held <= need[use], (use, ledger, need)


def test_a_preset_of_parts_that_are_there_is_one_entry(monkeypatch, tmp_path):
    """Listed, told, opened and refused as the others are."""
    settings = {"summary.kind": "min_max", "selection.group_tokens": 16}
    settings |= {"selection.top_k_groups": 64, "memory.pages_per_layer": 128}
    mine = Preset("mine", "Nobody", "Never.", "Always.", settings, "", ("of nobody",))
    monkeypatch.setattr("kvswap_torch.preset.registry.PRESETS", (*kvswap_torch.presets(), mine))
    assert kvswap_torch.presets()[-1] is mine
    assert SwapConfig.preset("mine", groups_max=32).groups_max == 32
    told = CliRunner().invoke(app, ["presets", "mine"])
    assert told.exit_code == 0 and "of nobody" in told.output
    model, inputs = model_of(2), prompt(2, 40)
    with KVSwapCache(model, tmp_path, preset="mine") as cache:
        assert torch.equal(greedy(model, inputs, cache, tokens=4), greedy(model, inputs, tokens=4))
        assert cache.stats().preset == "mine"
    with pytest.raises(kvswap_torch.ConfigError, match="nearest: mine"):
        SwapConfig.preset("mina")


@pytest.mark.parametrize("name", re.findall(r"^\| `([^`]+)` \|", ROWS, re.MULTILINE))
def test_each_line_of_the_documentation_decodes(name, tmp_path):
    """By the name that stands there, with a budget that holds a few groups."""
    model = model_of(2)
    with KVSwapCache(model, tmp_path, small(name, model, 2)) as cache:
        assert greedy(model, prompt(2, 90, padding=(0, 7)), cache, tokens=6).shape == (2, 96)
        assert cache.stats().tokens == 95
