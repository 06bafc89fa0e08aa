"""Linear layers in half precision: what torch's compute, rounded once."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import half_linear, ops
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.errors import ConfigError
from kvswap_torch.half_linear import (
    FEW_ROWS,
    HALF,
    HalfLinear,
    has_products,
    replace_linear,
)
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.lookahead import LookAhead


@pytest.fixture
def lacking(monkeypatch):
    """A processor without products of bf16 or fp16."""
    monkeypatch.setattr(half_linear, "has_products", lambda dtype: dtype not in HALF)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, FEW_ROWS - 1, FEW_ROWS, 50])
def test_a_layer_adds_up_in_fp32_and_rounds_once(lacking, dtype, rows):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 8), torch.nn.Linear(8, 8, bias=False))
    for weights in model.parameters():  # small whole numbers, whose sums are exact in any order
        weights.data = torch.randint(-9, 10, weights.shape).to(dtype)
    taken = torch.randint(-9, 10, (1, rows, 24)).to(dtype)
    exact = [layer.weight.double() for layer in model]
    assert replace_linear(model)
    with torch.no_grad():
        first = (taken.double() @ exact[0].T + model[0].bias.double()).float().to(dtype)
        assert torch.equal(model[0](taken), first)
        assert torch.equal(model[1](first), (first.double() @ exact[1].T).float().to(dtype))


def test_few_rows_are_ours_where_torch_has_products(monkeypatch):
    monkeypatch.setattr(half_linear, "has_products", lambda dtype: True)
    layer = torch.nn.Linear(40, 24).bfloat16()
    model = torch.nn.Sequential(layer)
    assert not replace_linear(model)  # no chunk will be widened
    chunk = torch.randn(2, 50, 40).bfloat16()
    with torch.no_grad():
        for few in (chunk[:1, :1], chunk[:1, : FEW_ROWS - 1]):
            assert torch.equal(model(few), ops.linear_rows(few, layer.weight, layer.bias))
        assert torch.equal(model(chunk), layer(chunk))


def test_training_other_dtypes_and_devices_are_torchs(lacking):
    layer = torch.nn.Linear(40, 24).bfloat16()
    model = torch.nn.Sequential(layer)
    replace_linear(model)
    for rows in (torch.randn(1, 40).bfloat16(), torch.randn(50, 40).bfloat16()):
        expected = layer(rows)
        assert torch.equal(model(rows), expected)
        (model(rows).sum() - expected.sum()).backward()
        assert not layer.weight.grad.any()  # of the same weights, once up and once down
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.randn(1, 40))
        assert model.to("meta")(torch.empty(1, 40, device="meta").bfloat16()).shape == (1, 24)


def test_weights_are_shared_and_ties_stay(lacking):
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 6, bias=False)}).bfloat16().eval()
    model["embedding"] = torch.nn.Embedding(6, 4)
    model["embedding"].weight = model["head"].weight
    before = {name: values.data_ptr() for name, values in model.state_dict().items()}
    assert replace_linear(model)
    assert {name: values.data_ptr() for name, values in model.state_dict().items()} == before
    assert model["head"].weight is model["embedding"].weight
    assert type(model["head"]) is HalfLinear and not model["head"].training
    assert not replace_linear(model)  # nothing is left to replace


def test_other_layers_are_left_alone(lacking):
    single = torch.nn.Sequential(torch.nn.Linear(4, 4))
    turned = torch.nn.Sequential(torch.nn.Linear(4, 6)).bfloat16()
    turned[0].weight = torch.nn.Parameter(turned[0].weight.T.contiguous().T)
    hooked, wrapped = (torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16() for _ in range(2))
    hooked[0].register_forward_hook(lambda *_: None)
    wrapped[0].forward = wrapped[0].forward
    adapted = torch.nn.Sequential(type("Adapted", (torch.nn.Linear,), {})(4, 4)).bfloat16()
    for model in (single, turned, hooked, wrapped, adapted):
        before = type(model[0])
        assert not replace_linear(model)
        assert type(model[0]) is before


def test_every_processor_multiplies_fp32():
    assert has_products(torch.float32)
    assert {has_products(dtype) for dtype in HALF} <= {True, False}


def test_a_command_says_what_it_widens(lacking, tiny_model_dir):
    said: list[str] = []
    model = load_model(str(tiny_model_dir), "bfloat16", say=said.append)
    assert said == [half_linear.TOLD] and not model.training
    assert type(model.lm_head) is HalfLinear
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
