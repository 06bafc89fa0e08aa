"""Products of fp32 in the place of those of bf16: what instructions for bf16 compute."""

from __future__ import annotations

import torch

from bench import wide_products
from bench.wide_products import widen_products


def test_a_layer_adds_up_in_fp32_and_rounds_once(monkeypatch):
    monkeypatch.setattr(wide_products, "has_bf16_products", lambda: False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 8), torch.nn.Linear(8, 8, bias=False))
    for weights in model.parameters():  # small whole numbers, whose sums are exact in any order
        weights.data = torch.randint(-9, 10, weights.shape).bfloat16()
    model.dtype = torch.bfloat16
    rows = torch.randint(-9, 10, (5, 24)).bfloat16()
    exact = [layer.weight.double() for layer in model]
    assert widen_products(model)
    with torch.no_grad():
        first = (rows.double() @ exact[0].T + model[0].bias.double()).float().bfloat16()
        assert torch.equal(model[0](rows), first)
        assert torch.equal(model[1](first), (first.double() @ exact[1].T).float().bfloat16())


def test_other_models_and_processors_are_left_alone(monkeypatch):
    monkeypatch.setattr(wide_products, "has_bf16_products", lambda: True)
    half = torch.nn.Linear(4, 4).bfloat16()
    half.dtype = torch.bfloat16
    assert not widen_products(half) and "forward" not in vars(half)
    monkeypatch.setattr(wide_products, "has_bf16_products", lambda: False)
    single = torch.nn.Linear(4, 4)
    single.dtype = torch.float32
    assert not widen_products(single) and "forward" not in vars(single)
