"""Weights that are stored in another type than they compute in: keys have the type of the input.

bitsandbytes and torchao are no dependency of the tests; what they do to a layer is also done here
by hand, so that the rule holds where they are missing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from kvswap_torch import KVSwapCache, UnsupportedModelError
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import COVERING, forward, greedy, prompt, tiny_model

HALVES = [torch.float32, torch.bfloat16, torch.float16]


class Stored(nn.Module):
    """A linear layer with weights stored as `stored`, which answers in its input's type."""

    def __init__(self, layer: nn.Linear, stored: torch.dtype, adapter: torch.dtype | None):
        super().__init__()
        scale = layer.weight.detach().float().abs().max() / 100
        self.register_buffer("scale", scale)
        numbers = (layer.weight.detach().float() / scale).to(stored)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        if adapter is not None:
            self.adapter = nn.Parameter(torch.zeros(len(numbers), dtype=adapter))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 2:  # packed by the first pass, as bitsandbytes does in 8 bits
            self.weight = nn.Parameter(self.weight.detach().flatten(), requires_grad=False)
        weight = self.weight.view(-1, given.shape[-1]).to(torch.float32) * self.scale
        return nn.functional.linear(given, weight.to(given.dtype))


def with_stored(dtype: torch.dtype, stored: torch.dtype, adapter: torch.dtype | None = None):
    model = tiny_model("llama", dtype=dtype)
    for layer in model.model.layers:
        for name, part in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, Stored(part, stored, adapter))
    return model


def agrees(model: Any, tmp_path: Any, dtype: torch.dtype, look_ahead: bool = True) -> None:
    """As with transformers' own cache: the same tokens in fp32, close logits in less."""
    config = dataclasses.replace(COVERING, look_ahead=look_ahead)
    inputs = prompt(1, 40)
    with KVSwapCache(model, tmp_path, config) as cache:
        assert cache.parts.dtype == dtype
        if dtype == torch.float32:
            assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))
            return
        ours = forward(model, inputs["input_ids"], cache).float()
    theirs = forward(model, inputs["input_ids"], None).float()
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_keys_have_the_type_of_what_comes_in(dtype, stored, tmp_path):
    agrees(with_stored(dtype, stored), tmp_path, dtype)


def test_an_adapter_in_another_type_does_not_say_what_keys_are(tmp_path):
    model = with_stored(torch.bfloat16, torch.int8, adapter=torch.float32)
    agrees(model, tmp_path, torch.bfloat16)


def test_what_is_not_quantised_says_its_own_type(tmp_path):
    """An embedding in another type than attention changes nothing."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.model.embed_tokens.float()
    assert model_parts(model).dtype == torch.bfloat16


def test_another_type_is_still_refused():
    with pytest.raises(
        UnsupportedModelError, match=r"is of type torch\.float64; float32, bfloat16"
    ):
        model_parts(tiny_model("llama", dtype=torch.float64))


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("dtype", HALVES[:2], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits, dtype, look_ahead, tmp_path):
    pytest.importorskip("bitsandbytes")
    made = {
        4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_type": "nf4"},
        8: {"load_in_8bit": True},
    }
    tiny_model("llama", hidden_size=64, dtype=dtype).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=dtype, quantization_config=BitsAndBytesConfig(**made[bits])
    ).eval()
    weights = [p for n, p in model.named_parameters() if "self_attn" in n]
    assert weights and not any(p.is_floating_point() for p in weights)
    agrees(model, tmp_path, dtype, look_ahead)


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("dtype", HALVES[:2], ids=str)
def test_torchao_int8(dtype, look_ahead, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama", dtype=dtype)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    agrees(model, tmp_path, dtype, look_ahead)
