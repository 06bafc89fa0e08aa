"""Linear layers whose weights are int8 or int4, on the CPU, by torch's own products.

*int8*: one scale for each output, an error of 0.9 % of a layer's result. *int4*: groups of 32
inputs, each with a scale and a zero, an error of 8 %.

A step of few tokens reads the weights once, so that fewer bytes take less time. A chunk of many
tokens computes: torch's products of few bits are slower there than those of the model's dtype, for
which a slice of the weights is made at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from kvswap_torch.errors import ConfigError
from kvswap_torch.half_linear import has_products

BITS = {"int8": 8, "int4": 4}
FORMATS = ("bf16", *BITS)  # what a command's --weights may be
GROUP = 32  # inputs of one scale and one zero, of int4
INT4_OUTPUTS = 16  # int4 layers have a multiple of so many outputs
INT4_LEVELS = ("AVX2", "AVX512")  # processors that torch has products of int4 for
UNIT = 64  # outputs that torch packs together, or a multiple of those
MANY_ROWS = {8: 192, 4: 768}  # by bits: from so many on, weights are made of the model's dtype
SLICE = 1024  # outputs at a time


class FewBitLinear(nn.Module):
    """A linear layer of int8 or int4 weights, for inference on the CPU.

    Parameters
    ----------
    bits
        8 or 4.
    dtype
        Of what comes in and goes out, and of scales.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        dtype: torch.dtype,
        bias: nn.Parameter | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        made = functools.partial(torch.empty, device=device)
        if bits == 8:
            codes = made(out_features, in_features, dtype=torch.int8)
            scales = made(out_features, dtype=dtype)
        else:
            codes = made(out_features, in_features // 2, dtype=torch.uint8)
            scales = made(in_features // GROUP, out_features, 2, dtype=dtype)  # scale, zero
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, layer: nn.Linear, weight: torch.Tensor, bits: int) -> FewBitLinear:
        """`layer` with its `weight`, ``[outputs, inputs]``, in few bits; the bias is shared."""
        few = cls(layer.in_features, layer.out_features, bits, weight.dtype, layer.bias, "cpu")
        encode = _encode8 if bits == 8 else _encode4
        for begin, end in _slices(few.out_features):
            codes, scales = encode(weight[begin:end].float())
            few.codes[begin:end] = codes
            if bits == 8:
                few.scales[begin:end] = scales
            else:
                few.scales[:, begin:end] = scales
        return few.train(layer.training)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` in, ``[..., out_features]`` out, both of the scales' dtype."""
        flat = rows.reshape(-1, self.in_features)
        if self.codes.is_meta:
            return self._of_shapes(rows)
        if len(flat) >= MANY_ROWS[self.bits]:
            made = self._of_many(flat)
        elif self.bits == 8:
            made = torch.ops.aten._weight_int8pack_mm(flat, self.codes, self.scales)
        else:
            made = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.codes, GROUP, self.scales)
        if self.bias is not None:
            made = made + self.bias
        return made.view(*rows.shape[:-1], self.out_features)

    def _of_many(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = flat.dtype if has_products(flat.dtype) else torch.float32
        given = flat.to(dtype)
        made = flat.new_empty(len(flat), self.out_features)
        for begin, end in _slices(self.out_features):
            made[:, begin:end] = F.linear(given, self.decoded(begin, end, dtype))
        return made

    def _of_shapes(self, rows: torch.Tensor) -> torch.Tensor:
        """As large as what `forward` makes, and what it makes on the way."""
        made = rows.new_empty(*rows.shape[:-1], self.out_features)
        rows.new_empty(min(SLICE, self.out_features), self.in_features)
        return made

    def decoded(
        self, begin: int = 0, end: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Weights of outputs ``[begin, end)``; of int4 `begin` is a multiple of `UNIT`."""
        end = self.out_features if end is None else end
        dtype = dtype or self.scales.dtype
        if self.bits == 8:
            return self.codes[begin:end].to(dtype) * self.scales[begin:end, None].to(dtype)
        scale, zero = self.scales[:, begin:end].to(dtype).transpose(0, 1)[..., None].unbind(2)
        codes = _unpacked(self.codes[begin:end]).to(dtype) - 8
        groups = codes.view(end - begin, -1, GROUP)
        return torch.addcmul(zero, groups, scale).reshape(end - begin, -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int{self.bits}"


def check_format(weights: str | None, device: str = "cpu") -> None:
    """That this machine can compute with weights in such a format.

    Raises
    ------
    ConfigError
        There is no such format, or it has no products here.
    """
    if weights is None:
        return
    if weights not in FORMATS:
        raise ConfigError(f"--weights: must be one of {', '.join(FORMATS)}, got {weights!r}")
    if weights in BITS and device != "cpu":
        raise ConfigError(f"--weights {weights}: must be on the CPU, got --device {device}")
    level = torch.backends.cpu.get_cpu_capability()
    if weights == "int4" and level not in INT4_LEVELS:
        raise ConfigError(
            "--weights int4: the processor must have AVX2 or AVX-512, which torch's products of "
            f"int4 use, and torch sees {level}; take --weights int8"
        )


def bits_by_layer(model: nn.Module, weights: str) -> dict[str, int]:
    """Which linear layers of a model have few bits, by name.

    All but an output layer that shares its weights with the embedding. Any other output layer has
    int8 with int4 too, and so has a layer whose shape torch has no product of int4 for.
    """
    bits = BITS[weights]
    head = model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is _embedding(model)
    found = {}
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear or (layer is head and tied):
            continue
        fits = layer.in_features % GROUP == 0 and layer.out_features % INT4_OUTPUTS == 0
        found[name] = bits if layer is not head and fits else 8
    return found


def _embedding(model: nn.Module) -> torch.Tensor | None:
    return getattr(model.get_input_embeddings(), "weight", None)


def format_of(model: nn.Module) -> str | None:
    """The one of few bits that a model was loaded in; None: in none."""
    bits = {layer.bits for layer in model.modules() if isinstance(layer, FewBitLinear)}
    return f"int{min(bits)}" if bits else None


def put_in_place(model: nn.Module, name: str, layer: nn.Module) -> None:
    """`layer` in the place of the one of that name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, child, layer)


def replace_unloaded(model: nn.Module, weights: str) -> None:
    """Of a model without weights (on the meta device): layers as they will be when it is loaded."""
    for name, bits in bits_by_layer(model, weights).items():
        layer = model.get_submodule(name)
        sizes = (layer.in_features, layer.out_features)
        few = FewBitLinear(*sizes, bits, layer.weight.dtype, layer.bias, "meta")
        put_in_place(model, name, few)


def _slices(outputs: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, outputs, SLICE):
        yield begin, min(begin + SLICE, outputs)


def _encode8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a scale for each output."""
    scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def _encode4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, and scale and zero of each group, ``[groups, outputs, 2]``."""
    groups = weight.view(len(weight), -1, GROUP)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((most - least) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    codes = ((groups - least) / scale).round_().clamp_(0, 15).view(len(weight), -1)
    pairs = torch.cat([scale, least + 8 * scale], 2)
    return _packed(codes.to(torch.int32)), pairs.transpose(0, 1)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """``[outputs, inputs]`` int32 below 16 -> ``[outputs, inputs / 2]``, as torch reads it."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The opposite, ``[outputs, inputs]`` uint8."""
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    whole = outputs // UNIT * UNIT
    parts = [
        _halves(packed[begin:end].reshape(-1, packed[begin:end].numel() // units))
        .index_select(1, _places((end - begin) // units, inputs))
        .view(end - begin, inputs)
        for begin, end, units in ((0, whole, whole // UNIT), (whole, outputs, 1))
        if end > begin
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Low and high halves of bytes, one after the other in the last dimension."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


@functools.lru_cache(maxsize=16)
def _places(outputs: int, inputs: int) -> torch.Tensor:
    """Where each code of so many outputs stands once packed, ``[outputs * inputs]`` int32.

    torch's order is its own, and another one on another processor. It is found by packing numbers
    that count the codes, four bits at a time.
    """
    count = torch.arange(outputs * inputs, dtype=torch.int32).view(outputs, inputs)
    found = torch.zeros(1, outputs * inputs, dtype=torch.int64)
    for shift in range(0, (outputs * inputs - 1).bit_length(), 4):
        packed = _packed((count >> shift) & 15)
        found += _halves(packed.view(1, -1)).long() << shift
    places = torch.empty(outputs * inputs, dtype=torch.int32)
    places[found[0]] = count.view(-1)
    return places
