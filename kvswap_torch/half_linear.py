"""Linear layers of bf16 and fp16 models on the CPU, faster than torch's own.

A step's work at a small batch is to read the weights once. torch reads them at half the speed of
memory; `kvswap_torch.ops.linear_rows` at most of it.

And where a processor has no instructions for products of such matrices, torch multiplies a prompt's
chunks one number at a time: 9 GFLOP/s beside 75 of fp32 on one core with AVX2 alone. There a
layer's weights are widened for as long as it takes a chunk to pass. What instructions for bf16 do
is to add up exact products in fp32 and round the sum once; so do both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HALF = (torch.bfloat16, torch.float16)
FEW_ROWS = 16  # fewer are multiplied by `linear_rows`
TOLD = "chunks by products of fp32, rounded: the processor has none of the model's dtype"


class HalfLinear(nn.Linear):
    """A linear layer in half precision, for inference; trained, or on a device, it is torch's."""

    is_wide = False  # chunks of `FEW_ROWS` rows or more are multiplied in fp32

    @classmethod
    def of(cls, layer: nn.Linear) -> HalfLinear:
        """The same weights; none are copied."""
        import kvswap_torch.op_library  # noqa: F401  for its op

        half = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        half.weight, half.bias = layer.weight, layer.bias
        half.is_wide = not has_products(layer.weight.dtype)
        return half.train(layer.training)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` in, ``[..., out_features]`` out, both of the weights' dtype."""
        weight, bias = self.weight, self.bias
        if torch.is_grad_enabled() or not weight.is_cpu or rows.dtype != weight.dtype:
            return F.linear(rows, weight, bias)
        if rows.numel() < FEW_ROWS * self.in_features:
            return torch.ops.kvswap_torch.linear_rows(rows, weight, bias)
        if not self.is_wide:
            return F.linear(rows, weight, bias)
        wide_bias = None if bias is None else bias.float()
        return F.linear(rows.float(), weight.float(), wide_bias).to(rows.dtype)


def has_products(dtype: torch.dtype) -> bool:
    """Does torch multiply such matrices by instructions of this processor?"""
    if dtype not in HALF:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    known = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return known._is_mkldnn_bf16_supported()
    return known._is_mkldnn_fp16_supported()


def replace_linear(model: nn.Module) -> bool:
    """Has a model's linear layers in half precision on the CPU be `HalfLinear`.

    Layers that something else has replaced, wrapped or hooked are left as they are. Takes no memory
    but, where there are no such products, one layer's weights in fp32 while a chunk passes.

    Returns
    -------
    bool
        Whether chunks will be multiplied in fp32, rounded; if so, `TOLD` says it.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if _is_replaceable(layer)
    ]
    for parent, name in places:
        setattr(parent, name, HalfLinear.of(getattr(parent, name)))
    return any(getattr(parent, name).is_wide for parent, name in places)


def _is_replaceable(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in HALF
        and layer.weight.is_contiguous()
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )
