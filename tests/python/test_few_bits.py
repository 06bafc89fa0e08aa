"""Linear layers of int8 and int4: torch's products, and the weights that these stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvswap_torch import few_bits
from kvswap_torch.errors import ConfigError
from kvswap_torch.few_bits import (
    BITS,
    GROUP,
    INT4_LEVELS,
    MANY_ROWS,
    UNIT,
    FewBitLinear,
    bits_by_layer,
    check_format,
    replace_unloaded,
)
from tests.python.tiny_models import tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
HAS_INT4 = torch.backends.cpu.get_cpu_capability() in INT4_LEVELS


def few(bits: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[nn.Linear, FewBitLinear]:
    if bits == 4 and not HAS_INT4:
        pytest.skip("the processor has neither AVX2 nor AVX-512")
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs).to(dtype)
    return layer, FewBitLinear.of(layer, layer.weight.data, bits)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


# Fewer outputs than torch packs together, some more, and more than one slice.
@pytest.mark.parametrize("outputs", [16, 48, UNIT, UNIT + 16, few_bits.SLICE + 80])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_few_and_many_rows_are_products_of_the_same_weights(bits, dtype, outputs) -> None:
    layer, made = few(bits, outputs, 96, dtype)
    rows = torch.randn(2, 3, 96).to(dtype)
    weight = made.decoded().double()
    exact = nn.functional.linear(rows.double(), weight, layer.bias.double())
    with torch.inference_mode():
        assert apart(made(rows), exact) < ERRORS[dtype]
        many = rows.repeat(1, MANY_ROWS[bits], 1)
        assert made(many).shape == (2, 3 * MANY_ROWS[bits], outputs)
        assert made(many).dtype == dtype
        assert apart(made(many)[:, :3], exact) < ERRORS[dtype]


@pytest.mark.parametrize(("bits", "error"), [(8, 0.006), (4, 0.08)])
def test_weights_are_near_what_they_were(bits, error) -> None:
    layer, made = few(bits, 80, 256, torch.float32)
    assert apart(made.decoded(), layer.weight.detach()) < error
    assert made.bias is layer.bias
    assert torch.equal(made.decoded(UNIT, 80), made.decoded()[UNIT:80])


@pytest.mark.parametrize("bits", [8, 4])
def test_what_few_bits_can_say_they_say_exactly(bits) -> None:
    layer, _ = few(bits, 16, 64, torch.float32)
    most = {8: 127, 4: 7}[bits]
    least = {8: -127, 4: -8}[bits]
    weight = torch.randint(least, most + 1, (16, 64)).float()
    weight[:, ::GROUP], weight[:, 1::GROUP] = most, least
    made = FewBitLinear.of(layer, weight, bits)
    assert torch.equal(made.decoded(), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_of_zeros_stays_zero(bits) -> None:
    layer, _ = few(bits, 16, 64, torch.float32)
    made = FewBitLinear.of(layer, torch.zeros(16, 64), bits)
    assert torch.equal(made.decoded(), torch.zeros(16, 64))


def test_memory_is_a_half_and_less() -> None:
    sizes = {}
    for bits in (8, 4):
        empty = FewBitLinear(1024, 1024, bits, torch.bfloat16, device="meta")
        sizes[bits] = sum(buffer.nbytes for buffer in empty.buffers())
    assert sizes == {8: 1024 * 1024 + 2 * 1024, 4: 1024 * 512 + 1024 * 1024 // GROUP * 4}


def test_a_processor_without_products_of_half_takes_fp32_for_many_rows(monkeypatch) -> None:
    _, made = few(8, 80, 96, torch.bfloat16)
    rows = torch.randn(MANY_ROWS[8], 96).bfloat16()
    with torch.inference_mode():
        usual = made(rows)
        monkeypatch.setattr(few_bits, "has_products", lambda dtype: dtype == torch.float32)
        assert apart(made(rows), usual) < ERRORS[torch.bfloat16]


def test_a_shared_head_stays_and_an_own_one_has_int8() -> None:
    tied, untied = (tiny_model("llama", tie_word_embeddings=tied) for tied in (True, False))
    assert "lm_head" not in bits_by_layer(tied, "int4")
    found = bits_by_layer(untied, "int4")
    assert found["lm_head"] == 8
    # 48 inputs are no multiple of a group; 64 are.
    assert found["model.layers.0.mlp.up_proj"] == 8
    assert found["model.layers.0.mlp.down_proj"] == 4
    assert set(bits_by_layer(untied, "int8").values()) == {8}
    replace_unloaded(untied, "int4")
    assert untied.model.layers[0].mlp.down_proj.bits == 4


@pytest.mark.parametrize("weights", ["int3", "fp8", ""])
def test_a_format_that_there_is_not_is_refused(weights) -> None:
    with pytest.raises(ConfigError, match="--weights: must be one of bf16, int8, int4, got"):
        check_format(weights)


@pytest.mark.parametrize("weights", BITS)
def test_few_bits_are_for_the_cpu(weights) -> None:
    with pytest.raises(ConfigError, match=f"--weights {weights}: must be on the CPU, got"):
        check_format(weights, "cuda")
    check_format("bf16", "cuda")
    check_format(None, "cuda")


def test_int4_without_its_instructions_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ConfigError, match="must have AVX2 or AVX-512.*take --weights int8"):
        check_format("int4")
    check_format("int8")
