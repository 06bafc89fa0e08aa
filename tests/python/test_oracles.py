"""What our presets keep of a prompt, against what the published systems' own code keeps.

The numbers stand in `tests/oracles`, whose programs made them; no code of others runs here.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvswap_torch import SwapConfig
from kvswap_torch.config import ModelIdentity
from kvswap_torch.config.engine import flat_settings
from kvswap_torch.projection import from_chunk
from tests.oracles import models
from tests.python.reference_methods import arkv, cake, compresskv
from tests.python.reference_options import Options
from tests.python.test_session import native

ROOM = Path(models.__file__).parent
KVPRESS = json.loads((ROOM / "kvpress.json").read_text())
DIVIDED = json.loads((ROOM / "divided.json").read_text())
PUBLISHED = json.loads((ROOM / "published.json").read_text())
MULTI_HEAD = [name for name in models.MODELS if name in PUBLISHED]
CHOSEN, FAR = 24, 128  # tokens of each head, of so many


class Layer(NamedTuple):
    """What attention computes with, after RoPE: ``[1, heads or kv_heads, tokens, HEAD_DIM]``."""

    query: torch.Tensor
    keys: torch.Tensor


def layers_of(name: str, tokens: int) -> list[Layer]:
    """Of the first `tokens` of a model's prompt."""
    seen: list[Layer] = []

    def take(module, query, key, value, mask, **others):
        seen.append(Layer(query.contiguous(), key.contiguous()))
        return sdpa_attention_forward(module, query, key, value, mask, **others)

    AttentionInterface.register("of_oracles", take)
    model = models.model_of(name, "of_oracles")
    with torch.no_grad():
        model(models.prompt_of(name, tokens))
    return seen


def opened(folder: Path, config: SwapConfig, layers: list[Layer]) -> Any:
    """A session with these settings, without projections."""
    heads, (kv_heads, _, dim) = layers[0].query.shape[1], layers[0].keys.shape[1:]
    shape = {"query_heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    told = flat_settings(config)
    ranks = [config.rank] if config.takes_projections else []
    return native(Options(layers=len(layers), directory=str(folder), ranks=ranks, **shape, **told))


def attended(folder: Path, config: SwapConfig, layers: list[Layer]) -> list[list[list[int]]]:
    """``[layers][kv_heads]``: of the prompt's tokens those that the next one attends.

    A query of zeros pays all alike; which they are stands in values that have a one for a single
    token. Values decide nothing, so that each `HEAD_DIM` tokens have a run of their own.
    """
    kv_heads, tokens, dim = layers[0].keys.shape[1:]
    found: list[list[list[int]]] = [[[] for _ in range(kv_heads)] for _ in layers]
    for first in range(0, tokens, dim):
        session = opened(folder, config, layers)
        for number, layer in enumerate(layers):
            values = torch.zeros_like(layer.keys)
            each = torch.arange(first, min(tokens, first + dim))
            values[:, :, each, each - first] = 1
            session.extend(number, layer.query, layer.keys, values, dim**-0.5)
        session.begin_pass("decode")
        for number, layer in enumerate(layers):
            one = torch.zeros_like(layer.keys[:, :, :1])
            query = torch.zeros_like(layer.query[:, :, :1])
            output = session.extend(number, query, one, one, 1.0)[0, 0]  # [heads, dim]
            of_heads = output.unflatten(0, (kv_heads, -1))[:, 0]
            for head in range(kv_heads):
                found[number][head] += (first + torch.where(of_heads[head] > 0)[0]).tolist()
        session.close()
    return found


def preset(name: str, kv_heads: int, **changes) -> SwapConfig:
    """For the models of oracles; `changes`: of what follows from the budget or the disk."""
    shape = (models.LAYERS, models.HEADS, kv_heads, models.HEAD_DIM)
    model = ModelIdentity("llama", *shape, dtype="float32")
    return SwapConfig.preset(name, **{"model": model, "group_tokens": 4} | changes)


@pytest.mark.parametrize("model", models.MODELS)
@pytest.mark.parametrize(
    ("name", "tokens", "setting", "always"),  # of what is kept so many always are
    [
        ("snapkv", 160, "keep_tokens", 32),
        ("tova", 161, "keep_tokens", 1),
        ("streaming", 160, "tail_tokens", 4),
    ],
)
def test_a_preset_keeps_what_the_original_keeps(tmp_path, model, name, tokens, setting, always):
    layers = layers_of(model, tokens)
    sizes = {setting: KVPRESS["kept"] - always}
    config = preset(name, layers[0].keys.shape[1], **sizes)
    assert attended(tmp_path, config, layers) == KVPRESS[model][name]


@pytest.mark.parametrize("model", models.MODELS)
def test_h2o_keeps_what_was_paid_most_in_all(tmp_path, model):
    """The original divides what a token was paid by the queries that could pay it; H2O, and we, do
    not. `keep_window` covers the prompt here; the preset looks at its end alone."""
    layers, half = layers_of(model, 160), KVPRESS["kept"] // 2
    sizes = {"keep_tokens": half, "tail_tokens": half, "keep_window": 160}
    means = torch.tensor(KVPRESS[model]["mean_attention"])  # [layers, kv_heads, tokens]
    paid = means * torch.arange(160, 0, -1)
    most = paid[..., : 160 - half].topk(half).indices.sort().values.tolist()
    newest = list(range(160 - half, 160))
    expected = [[head + newest for head in layer] for layer in most]
    config = preset("h2o", layers[0].keys.shape[1], **sizes)
    assert attended(tmp_path, config, layers) == expected


@pytest.mark.parametrize("model", models.MODELS)
def test_think_drops_the_channels_that_the_original_drops(model):
    for layer, dropped in zip(layers_of(model, 160), KVPRESS[model]["channels"], strict=True):
        rank = models.HEAD_DIM - len(dropped[0])
        keys, queries = from_chunk("channels", layer.keys, layer.query, rank, heads="each")
        assert torch.equal(keys, queries)
        of_heads = keys.unflatten(0, (layer.keys.shape[1], -1)).abs().sum(dim=2)
        found = [torch.where(head == 0)[0].tolist() for head in of_heads]
        assert found == dropped


def chosen(folder: Path, config: SwapConfig, layers: list[Layer]) -> list[list[list[int]]]:
    """``[layers][kv_heads]``: the groups that the prompt's newest query chooses."""
    session = opened(folder, config, layers)
    found = []
    for number, (query, keys) in enumerate(layers):
        if config.takes_projections:
            kind = config.projection_kind
            pair = from_chunk(kind, keys, query, config.rank, heads=config.heads)
            session.set_projection(number, *pair)
        session.begin_pass("prefill")
        session.extend(number, query, keys, keys, models.HEAD_DIM**-0.5)
        session.begin_pass("decode")
        one = keys[:, :, -1:]
        session.extend(number, query[:, :, -1:], one, one, models.HEAD_DIM**-0.5)
        found.append(session.last_selection(number))
    session.close()
    return found


@pytest.mark.parametrize("model", MULTI_HEAD)
def test_quest_chooses_the_pages_that_the_original_chooses(tmp_path, model):
    config = preset("quest", models.HEADS, group_tokens=16, groups_max=3, tail_tokens=32)
    config = dataclasses.replace(config, exact_layers=())
    assert chosen(tmp_path, config, layers_of(model, 160)) == PUBLISHED[model]["quest"]


@pytest.mark.parametrize("model", MULTI_HEAD)
def test_loki_chooses_the_tokens_that_the_original_chooses(tmp_path, model):
    config = preset("loki", models.HEADS, group_tokens=1, groups_max=CHOSEN)
    assert chosen(tmp_path, config, layers_of(model, 160)) == PUBLISHED[model]["loki"]


@pytest.mark.parametrize("model", MULTI_HEAD)
def test_infinigen_chooses_the_tokens_that_the_original_chooses(tmp_path, model):
    config = preset("infinigen", models.HEADS, group_tokens=1, groups_max=CHOSEN)
    assert chosen(tmp_path, config, layers_of(model, 160)) == PUBLISHED[model]["infinigen"]


@pytest.mark.parametrize("model", MULTI_HEAD)
def test_shadowkv_takes_the_chunks_that_the_original_takes(tmp_path, model):
    """Those whose mean fits them badly stay; the others are chosen from by their means."""
    sizes = {"group_tokens": 8, "groups_max": 3, "keep_tokens": 4 * 8}
    layers, expected = layers_of(model, 160), PUBLISHED[model]["shadowkv"]
    config = preset("shadowkv", models.HEADS, **sizes)
    assert chosen(tmp_path, config, layers) == [layer["chosen"] for layer in expected]
    # A query of zeros chooses the first of those that do not stay.
    for layer, theirs in zip(attended(tmp_path, config, layers), expected, strict=True):
        for head, outliers in zip(layer, theirs["outliers"], strict=True):
            others = [chunk for chunk in range(FAR // 8) if chunk not in outliers]
            far = {token // 8 for token in head if token < FAR}
            assert far == {*outliers, *others[:3]}


@pytest.mark.parametrize("model", MULTI_HEAD)
def test_arkv_keeps_what_the_original_keeps(tmp_path, model):
    """Of each KV head, as the original does. Its variance is that of a sample of the queries."""
    config = preset("arkv-origin", models.HEADS, heads="each", keep_tokens=KVPRESS["kept"] - 32)
    window = config.keep_window
    as_theirs = config.keep_variance * window / (window - 1)
    config = dataclasses.replace(config, keep_variance=as_theirs)
    assert attended(tmp_path, config, layers_of(model, 160)) == PUBLISHED[model]["arkv"]


@pytest.mark.parametrize("case", DIVIDED["arkv"], ids=range(len(DIVIDED["arkv"])))
def test_arkv_divides_a_layers_tokens(case):
    """What `kvswap presets arkv` says of the original: its first layer is not divided, and of those
    that may stay as they are it takes the window off once more."""
    settings = SwapConfig.preset("arkv", keep_tokens=case["tokens"] - 32)
    window, room, most = settings.keep_window, settings.keep_tokens, max(case["worth"])
    ours = [arkv.in_dtype_of(one / most, room) for one in case["worth"]]
    assert window == 32 and [room, *ours[1:]] == case["in_dtype"]
    stay = int(settings.keep_slack * (room + 1))
    theirs = [stay - min(stay, max(0, count - window)) for count in case["in_dtype"]]
    assert theirs == case["rounded"]


@pytest.mark.parametrize("case", DIVIDED["cake"], ids=range(len(DIVIDED["cake"])))
def test_cake_divides_tokens_among_layers(case):
    """What is no more is gone: so many that some layer is full are among the cases."""
    preferences, layers = case["preferences"], len(case["preferences"])
    ours = cake.divide(preferences, [case["limit"]] * layers, case["average"] * layers)
    assert ours == case["tokens"]


@pytest.mark.parametrize("case", DIVIDED["compresskv"], ids=range(len(DIVIDED["compresskv"])))
def test_compresskv_divides_tokens_among_layers(case):
    """A window of 8, at least 32 tokens with it and at most three times the average."""
    average = case["average"]
    settings = SwapConfig.preset("compresskv", keep_heads=(0,), keep_layer_shares=(1.0,))
    window, most = settings.keep_window, settings.keep_layer_most
    ours = compresskv.divide(
        case["shares"],
        average,
        settings.keep_layer_least,
        int(most * (average + window)) - window,
    )
    assert window == 8 and ours == case["tokens"]
