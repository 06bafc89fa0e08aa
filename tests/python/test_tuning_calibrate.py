"""Calibration of tiny models: what is observed, what is written, and that a cache takes it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from python.tiny_models import VOCABULARY, greedy, prompt, tiny_model
from transformers import DynamicCache

from kvswap_torch import ConfigError, ModelIdentity, SwapConfig
from kvswap_torch.config import Prefetch
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.tuning.calibration import CalibrationOptions, calibrate
from kvswap_torch.tuning.choices import Choices
from kvswap_torch.tuning.observe import Calibrator
from kvswap_torch.tuning.recall import Choice
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.settings import prediction_losses, true_query_layers
from kvswap_torch.tuning.work import from_calibration, pick_summary_dtype
from tests.python import every_model

TOKENS, FOCUS = 120, 80
CHOICE = Choice(group_tokens=2, groups_max=4, sink_tokens=2, tail_tokens=4)
OPTIONS = CalibrationOptions(choice=CHOICE, steps_max=16)


pytestmark = pytest.mark.usefixtures("one_thread")


def sample(seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(torch.randint(3, VOCABULARY, (TOKENS,), generator=generator), FOCUS)


def observe(model) -> dict:
    found = {}
    Calibrator(model).read(sample(), lambda seen: found.setdefault(seen.layer, seen))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3"])
def test_keys_are_those_of_a_cache(family):
    model = tiny_model(family)
    found = observe(model)
    parts = model_parts(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=sample().ids[None], past_key_values=cache)
    assert sorted(found) == list(range(parts.shape.layers))
    for number, index in enumerate(parts.disk):
        torch.testing.assert_close(found[number].keys, cache.layers[index].keys)
        assert found[number].query.shape == (1, 4, TOKENS, parts.shape.head_dim)


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_predictions_are_the_next_layers_query_of_this_layers_input(family):
    """Made by hand; phi3 takes the generic path, qwen3 the fast one where it is built."""
    model = tiny_model(family)
    found = observe(model)
    assert found[0].predicted is None
    inputs = {}
    layers = model.get_decoder().layers

    def remember(module, args, kwargs):
        inputs[module.layer_idx] = dict(kwargs)

    handles = [
        layer.self_attn.register_forward_pre_hook(remember, with_kwargs=True) for layer in layers
    ]
    with torch.no_grad():
        model(input_ids=sample().ids[None], use_cache=False)
        for handle in handles:
            handle.remove()
        # Run layer 1's attention over layer 0's input and see its query.
        seen = []
        mixer = layers[1].self_attn
        calibrator = Calibrator(model)
        calls = inputs[1] | {"hidden_states": inputs[0]["hidden_states"]}
        with calibrator._watched(seen.append):
            mixer(**calls)
    torch.testing.assert_close(_summed(found[1].predicted), _summed(seen[0].query))


def _summed(query: torch.Tensor) -> torch.Tensor:
    return query.unflatten(1, (2, -1)).sum(2)


def test_the_model_is_as_before_even_after_an_error():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    expected = greedy(model, prompt(1, 20))

    def fail(seen):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        Calibrator(model).read(sample(), fail)
    assert model.config._attn_implementation == before
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)
    assert torch.equal(greedy(model, prompt(1, 20)), expected)


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_capped_scores_and_sinks_are_the_models_own(family):
    """What samples are read with is what the model's eager attention gives."""
    model = every_model.build(family)
    model.set_attn_implementation("eager")
    outputs, seen = [], []
    handle = model.model.register_forward_hook(lambda *call: outputs.append(call[-1][0]))
    with torch.no_grad():
        model(input_ids=sample().ids[None], use_cache=False)
    calibrator = Calibrator(model)
    calibrator.read(sample(), seen.append)
    handle.remove()
    torch.testing.assert_close(outputs[1], outputs[0])
    assert [one.layer for one in seen] == list(range(len(calibrator.parts.disk)))
    for index, one in zip(calibrator.parts.disk, seen, strict=True):
        own = getattr(calibrator.parts.mixers[index], "sinks", None)
        assert (one.sinks is None) if own is None else torch.equal(one.sinks, own)
        assert one.softcap == (getattr(model.config, "attn_logit_softcapping", None) or 0.0)
    assert calibrate(model, [sample()], [sample(1)], OPTIONS).tables


def test_unsupported_models_are_named():
    model = tiny_model("mistral", sliding_window=6)
    with pytest.raises(UnsupportedModelError, match="no full-attention layer"):
        calibrate(model, [sample()], [sample(1)])


def test_nothing_to_fit_or_measure_is_an_error():
    with pytest.raises(ValueError, match="at least one sample"):
        calibrate(tiny_model("llama"), [sample()], [])


@pytest.fixture(scope="module")
def calibrated():
    model = tiny_model("llama")
    samples = [sample(seed) for seed in range(3)]
    return model, calibrate(model, samples[:2], samples[2:], OPTIONS)


def test_recall_is_between_nothing_and_the_best(calibrated):
    _, calibration = calibrated
    ways = {("query_aware", dtype) for dtype in ("model", "int8", "int4")}
    ways |= {("svd_keys", "model")}
    queries = ("predicted", "true")
    assert set(calibration.tables) == {(*way, query) for way in ways for query in queries}
    for table in calibration.tables.values():
        for recall, best in zip(table.recall(), table.best(), strict=True):
            assert all(0 < value <= best + 1e-6 for value in recall.values())


def test_warnings_name_what_is_too_little(calibrated):
    _, calibration = calibrated
    assert any("give more text" in warning for warning in calibration.warnings)


def fake(values, found=(0.0, 0.0, 0.0)):
    recall = [{4: value - 0.1, 8: value} for value in values]
    return SimpleNamespace(
        worth=lambda: recall,
        recall=lambda: recall,
        best=lambda: [1.0] * 3,
        found_by_few=lambda: list(found),
    )


def with_tables(calibration, predicted, true):
    tables = {
        ("query_aware", dtype, query): table
        for dtype in ("model", "int8")
        for query, table in (("predicted", predicted), ("true", true))
    }
    return dataclasses.replace(calibration, tables=tables)


@pytest.mark.parametrize(
    ("worth", "dtype"),  # at ranks 8, 12 and 16
    [
        ({"model": (0.5, 0.6, 0.7), "int8": (0.5, 0.6, 0.7), "int4": (0.4, 0.51, 0.6)}, "int4"),
        ({"model": (0.5, 0.6, 0.7), "int8": (0.5, 0.6, 0.7), "int4": (0.4, 0.49, 0.6)}, "int8"),
        ({"model": (0.5, 0.6, 0.7), "int8": (0.4, 0.6, 0.7), "int4": (0.4, 0.9, 0.9)}, "model"),
        ({"model": (0.5, 0.6, 0.7), "int8": (0.5, 0.6, 0.7)}, "int8"),  # a device has no int4
    ],
)
def test_rows_are_of_as_few_bits_as_more_columns_make_up_for(calibrated, worth, dtype):
    _, calibration = calibrated
    tables = {
        ("query_aware", each, "true"): SimpleNamespace(
            worth=lambda values=values: [dict(zip((8, 12, 16), values, strict=True))] * 3
        )
        for each, values in worth.items()
    }
    assert pick_summary_dtype(dataclasses.replace(calibration, tables=tables)) == dtype


@pytest.mark.parametrize(
    ("by_prediction", "layers"),
    [
        ((0.3, 0.3, 0.4), ()),
        ((0.2955, 0.3, 0.4), ()),  # 0.005 of all look-ups may be lost
        ((0.294, 0.3, 0.4), (0,)),
        ((0.2975, 0.2975, 0.3985), (1,)),  # by all predicted layers together, the later ones first
        ((0.2, 0.5, 0.3), (0, 2)),  # more that is found elsewhere does not make up for it
    ],
)
def test_layers_whose_look_ups_prediction_loses_choose_with_their_true_query(
    calibrated, by_prediction, layers
):
    _, calibration = calibrated
    same = [0.8, 0.7, 0.6]
    tables = fake(same, by_prediction), fake(same, (0.3, 0.3, 0.4))
    assert true_query_layers(with_tables(calibration, *tables)) == layers


def test_a_layer_that_prediction_fails_chooses_with_its_true_query(calibrated):
    _, calibration = calibrated
    faked = with_tables(calibration, fake([0.8, 0.3, 0.79]), fake([0.8, 0.7, 0.8]))
    assert true_query_layers(faked) == (1,)
    assert prediction_losses(faked)[1] == pytest.approx({4: 0.4, 8: 0.4})
    assert (
        prediction_losses(with_tables(calibration, fake([0.9] * 3), fake([0.8] * 3)))
        == [{4: 0.0, 8: 0.0}] * 3
    )  # a prediction that finds more loses nothing


def test_a_projection_is_made_for_the_query_that_selects(calibrated):
    _, calibration = calibrated
    held = {4: [{8: 0.5}] * 3}
    choices = Choices(64, 8, held, {4: [1.0] * 3}, {4: []})
    known = from_calibration(calibration, choices)
    for mode, skipped, queries in (
        ("verify", (), ("true", "true", "true")),
        ("off", (), ("true", "true", "true")),
        ("trust", (), ("true", "predicted", "predicted")),
        ("trust", (1,), ("true", "true", "predicted")),
    ):
        config = SwapConfig(prefetch=Prefetch(mode=mode, skip_layers=skipped))
        for layer, query in enumerate(queries):
            pair = calibration.pairs["query_aware", query][layer]
            assert known.pairs_for(config)[layer] is pair


@pytest.mark.parametrize("focus", [0, TOKENS])
def test_a_sample_has_something_to_read_and_something_to_decode(focus):
    with pytest.raises(ValueError, match="focus must lie inside"):
        Sample(torch.arange(TOKENS), focus)


def test_a_sample_is_one_row_of_token_numbers():
    with pytest.raises(ValueError, match=r"\[tokens\] int64"):
        Sample(torch.zeros(1, 5), 2)


@pytest.mark.parametrize("layers", [[1, 1], [2, 1], [-1], [True], "1", 1])
def test_true_query_layers_must_be_rising_numbers(layers):
    with pytest.raises(ConfigError, match="true_query_layers: must be numbers of layers, rising"):
        SwapConfig(true_query_layers=layers)


def test_true_query_layers_must_be_the_models():
    layers = {"true_query_layers": [0, 3]}
    table = SwapConfig(table=[{"batch": 1, "context": 8, "settings": layers}])
    for config, where in ((SwapConfig(**layers), "^"), (table, "solutions: batch 1, context 8: ")):
        config.check_model(ModelIdentity(layers=4))
        told = where + r"prefetch.skip_layers: must be below 3, the layers on disk, got \[0, 3\]"
        with pytest.raises(ConfigError, match=told):
            config.check_model(ModelIdentity(layers=3))
