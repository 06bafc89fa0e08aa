"""Long chunks of a bf16 or fp16 model by fp32 products, on processors that have none of its own.

Where a processor has no instructions for products of such matrices, torch multiplies them one
number at a time. A step's single row is no slower for it, since reading the weights is what takes
the time; a chunk of a prompt is: 9 GFLOP/s beside 75 of fp32 on one core with AVX2 alone. So a
layer's weights are widened for as long as it takes a chunk to pass. What instructions for bf16 do
is to add up exact products in fp32 and round the sum once; so does this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

ROWS_MIN = 16  # from here on widening the weights takes less than it saves
TOLD = "chunks by products of fp32, rounded: the processor has none of the model's dtype"


class WideLinear(nn.Linear):
    """A linear layer whose chunks of `ROWS_MIN` rows or more are multiplied in fp32."""

    @classmethod
    def of(cls, layer: nn.Linear) -> WideLinear:
        """The same weights; none are copied."""
        wide = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        wide.weight, wide.bias = layer.weight, layer.bias
        return wide.train(layer.training)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` in, ``[..., out_features]`` out, both of the weights' dtype."""
        if rows.numel() < ROWS_MIN * self.in_features:
            return super().forward(rows)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(rows.float(), self.weight.float(), bias).to(rows.dtype)


def has_products(dtype: torch.dtype) -> bool:
    """Does torch multiply such matrices by instructions of this processor?"""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    known = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return known._is_mkldnn_bf16_supported()
    return known._is_mkldnn_fp16_supported()


def widen_products(model: nn.Module) -> bool:
    """Has a model's linear layers do so, where it is on a processor that lacks the products.

    Layers that something else has replaced, wrapped or hooked are left as they are. Takes no memory
    but one layer's weights in fp32 while a chunk passes.

    Returns
    -------
    bool
        Whether any layer was.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if _is_slow(layer)
    ]
    for parent, name in places:
        setattr(parent, name, WideLinear.of(getattr(parent, name)))
    return bool(places)


def _is_slow(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.device.type == "cpu"
        and not has_products(layer.weight.dtype)
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )
