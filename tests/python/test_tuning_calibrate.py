"""Calibration of tiny models: what is observed, what is written, and that a cache takes it."""

from __future__ import annotations

import json

import pytest
import torch
from python.tiny_models import SMALL, VOCABULARY, greedy, has_native, prompt, tiny_model
from transformers import DynamicCache

from kvswap_torch import BudgetError, KVSwapCache, SwapConfig
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf.families import model_parts
from tuning.calibrate import Calibrator
from tuning.calibration import CalibrationOptions, calibrate
from tuning.recall import Choice
from tuning.samples import Sample, windows
from tuning.session_need import Demand, engine_need
from tuning.settings import choose_settings, save_settings

TOKENS, FOCUS = 120, 80
CHOICE = Choice(group_tokens=2, groups_max=4, sink_tokens=2, tail_tokens=4)
OPTIONS = CalibrationOptions(choice=CHOICE, steps_max=16)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    assert set(calibration.tables) == {
        ("query_aware", "model"),
        ("query_aware", "int8"),
        ("svd_keys", "model"),
    }
    for table in calibration.tables.values():
        for query in ("predicted", "true"):
            for recall, best in zip(table.recall(query), table.best(), strict=True):
                assert all(0 < value <= best + 1e-6 for value in recall.values())


def test_warnings_name_what_is_too_little(calibrated):
    _, calibration = calibrated
    assert any("give more text" in warning for warning in calibration.warnings)


def columns_need(config: SwapConfig) -> dict[str, int]:
    factor = 1 if config.summary_dtype == "int8" else 2
    size = 1000 + factor * sum(config.ranks(3)) + config.pages_max
    return {"everything": size, "total": size}


@pytest.mark.parametrize("budget", [1045, 1060, 1300])
def test_the_budget_is_kept_and_written_down(calibrated, budget, tmp_path):
    _, calibration = calibrated
    demand = Demand(4096, 1, budget)
    chosen = choose_settings(calibration, demand, columns_need)
    assert chosen.need == columns_need(chosen.config)
    assert chosen.need["total"] <= budget
    config = save_settings(tmp_path, calibration, chosen, demand)
    assert SwapConfig.load(tmp_path / "kvswap.json") == config
    written = json.loads((tmp_path / "kvswap.json").read_text())
    assert written["provenance"]["need_bytes"] == chosen.need["total"]
    assert written["model"]["layers"] == 3
    before = (tmp_path / "kvswap.json").read_bytes()
    save_settings(tmp_path, calibration, chosen, demand)
    assert (tmp_path / "kvswap.json").read_bytes() == before


def test_a_budget_for_nothing_names_the_minimum(calibrated):
    _, calibration = calibrated
    with pytest.raises(BudgetError, match="raise the budget"):
        choose_settings(calibration, Demand(4096, 1, 1020), columns_need)


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_a_cache_takes_what_was_written_and_stays_in_the_budget(calibrated, tmp_path):
    model, calibration = calibrated
    demand = Demand(4096, 1, 2 << 20)
    base = SwapConfig(**(SMALL | {"rank": 4}))
    chosen = choose_settings(calibration, demand, engine_need(model, demand), base)
    save_settings(tmp_path, calibration, chosen, demand)
    with KVSwapCache(
        model,
        path=tmp_path,
        config=tmp_path / "kvswap.json",
        kv_memory_bytes=demand.budget_bytes,
        max_context=4096,
        max_batch=1,
    ) as cache:
        assert cache.driver.config.rank == chosen.config.rank
        assert cache.driver.config.pages_max == chosen.config.pages_max
        out = greedy(model, prompt(1, 60), cache)
    assert out.shape == (1, 72)


def test_windows_cut_a_long_text():
    cut = windows(torch.arange(1000), 300, 100)
    assert [len(piece.ids) for piece in cut] == [300, 300, 300]
    assert [piece.focus for piece in cut] == [200, 200, 200]
    with pytest.raises(ValueError, match="give a longer text"):
        windows(torch.arange(100), 300, 10)
    with pytest.raises(ValueError, match="decoded must be 1 to 299"):
        windows(torch.arange(1000), 300, 300)


@pytest.mark.parametrize("focus", [0, TOKENS])
def test_a_sample_has_something_to_read_and_something_to_decode(focus):
    with pytest.raises(ValueError, match="focus must lie inside"):
        Sample(torch.arange(TOKENS), focus)


def test_a_sample_is_one_row_of_token_numbers():
    with pytest.raises(ValueError, match=r"\[tokens\] int64"):
        Sample(torch.zeros(1, 5), 2)
