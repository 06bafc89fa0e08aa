"""A bf16 model's linear layers by fp32 products, on processors that have none of bf16.

torch computes a product of bf16 matrices element by element where the processor has no instructions
for it (1 GFLOP/s beside 60 in fp32, on AVX2): a document of 4,096 tokens takes minutes. What
such instructions do is to add up exact products in fp32 and round the sum once; so does this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

TOLD = "of fp32, rounded to bf16: the processor has none of bf16"  # beside results


def has_bf16_products() -> bool:
    """Does torch multiply bf16 matrices by instructions of this processor?"""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widen_products(model: Any) -> bool:
    """Has the model's linear layers do so, where it is of bf16 and the processor lacks them.

    Takes 4 bytes a weight beside the model's own.
    """
    if model.dtype != torch.bfloat16 or has_bf16_products():
        return False
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _wide(module)
    return True


def _wide(linear: torch.nn.Linear) -> Any:
    weight = linear.weight.detach().float()
    bias = None if linear.bias is None else linear.bias.detach().float()
    return lambda rows: F.linear(rows.float(), weight, bias).to(rows.dtype)
