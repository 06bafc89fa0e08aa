"""Long chunks by products of fp32 in the place of those of bf16: what instructions compute."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import wide_products
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.wide_products import ROWS_MIN, WideLinear, has_products, widen_products

NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture
def lacking(monkeypatch):
    """A processor without products of bf16 or fp16."""
    monkeypatch.setattr(wide_products, "has_products", lambda dtype: dtype not in NARROW)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rows", [1, ROWS_MIN - 1, ROWS_MIN, 50])
def test_a_layer_adds_up_in_fp32_and_rounds_once(lacking, dtype, rows):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 8), torch.nn.Linear(8, 8, bias=False))
    for weights in model.parameters():  # small whole numbers, whose sums are exact in any order
        weights.data = torch.randint(-9, 10, weights.shape).to(dtype)
    taken = torch.randint(-9, 10, (1, rows, 24)).to(dtype)
    exact = [layer.weight.double() for layer in model]
    assert widen_products(model)
    with torch.no_grad():
        first = (taken.double() @ exact[0].T + model[0].bias.double()).float().to(dtype)
        if rows >= ROWS_MIN:  # below, torch's own kernel may round before the bias is added
            assert torch.equal(model[0](taken), first)
        assert torch.equal(model[1](first), (first.double() @ exact[1].T).float().to(dtype))


def test_weights_are_shared_and_ties_stay(lacking):
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 6, bias=False)}).bfloat16().eval()
    model["embedding"] = torch.nn.Embedding(6, 4)
    model["embedding"].weight = model["head"].weight
    before = {name: values.data_ptr() for name, values in model.state_dict().items()}
    assert widen_products(model)
    assert {name: values.data_ptr() for name, values in model.state_dict().items()} == before
    assert model["head"].weight is model["embedding"].weight
    assert type(model["head"]) is WideLinear and not model["head"].training
    assert not widen_products(model)  # nothing is left to widen


def test_other_models_and_processors_are_left_alone(lacking, monkeypatch):
    single = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert not widen_products(single)

    hooked, wrapped = (torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16() for _ in range(2))
    hooked[0].register_forward_hook(lambda *_: None)
    wrapped[0].forward = wrapped[0].forward
    adapted = torch.nn.Sequential(type("Adapted", (torch.nn.Linear,), {})(4, 4)).bfloat16()
    for model in (hooked, wrapped, adapted):
        assert not widen_products(model)

    monkeypatch.setattr(wide_products, "has_products", lambda dtype: True)
    assert not widen_products(torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16())


def test_every_processor_multiplies_fp32():
    assert has_products(torch.float32)
    assert {has_products(dtype) for dtype in NARROW} <= {True, False}


def test_a_command_says_what_it_widens(lacking, tiny_model_dir):
    said: list[str] = []
    model = load_model(str(tiny_model_dir), "bfloat16", say=said.append)
    assert said == [wide_products.TOLD] and not model.training
    assert type(model.lm_head) is WideLinear
    load_model(str(tiny_model_dir), "float32", say=said.append)
    assert len(said) == 1


def test_a_command_names_what_it_cannot_load(tmp_path):
    with pytest.raises(ConfigError, match="--model: must be a model of ours, got"):
        load_model(str(tmp_path / "none"), wanted="a model of ours")
    with pytest.raises(ConfigError, match="--model: must be a Hugging Face .* tokenizer, got"):
        load_tokenizer(str(tmp_path / "none"))


def test_queries_are_predicted_the_fast_way(lacking, tiny_model_dir):
    model = load_model(str(tiny_model_dir), "bfloat16")
    assert LookAhead(model_parts(model)).description == "fast"
