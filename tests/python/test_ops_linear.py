"""A linear layer of few rows, against a reference in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from kvswap_torch import ops
from tests import reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (130, 96), (64, 1000), (0, 8), (5, 0)])
@pytest.mark.parametrize("rows", [(), (1, 1), (2, 3), (0,), (4, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_rows(dtype, shape, rows, has_bias):
    weight = torch.randn(shape).to(dtype) / max(shape[1], 1) ** 0.5
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    given = torch.randn(*rows, shape[1]).to(dtype)
    result = ops.linear_rows(given, weight, bias)
    assert result.dtype == dtype and result.shape == (*rows, shape[0])
    expected, step = reference.linear_rows(given, weight, bias), STEP[dtype]
    torch.testing.assert_close(result, expected, rtol=step, atol=step)


def test_threads_change_no_bit():
    weight, row = torch.randn(2000, 130).bfloat16(), torch.randn(130).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ops.linear_rows(row, weight)
        torch.set_num_threads(2)
        assert torch.equal(ops.linear_rows(row, weight), alone)
    finally:
        torch.set_num_threads(threads)


def test_strided_rows_and_bias():
    row, bias = torch.randn(1, 20, 2)[..., 0], torch.randn(6, 2)[:, 1]
    weight = torch.randn(6, 20)
    expected = reference.linear_rows(row, weight, bias)
    torch.testing.assert_close(ops.linear_rows(row, weight, bias), expected)


def test_opcheck():
    opcheck(
        torch.ops.kvswap_torch.linear_rows,
        (torch.randn(1, 1, 12), torch.randn(5, 12), torch.randn(5)),
    )
    opcheck(
        torch.ops.kvswap_torch.linear_rows,
        (torch.randn(3, 12).bfloat16(), torch.randn(5, 12).bfloat16()),
    )


ROW, WEIGHT, BIAS = torch.randn(1, 12), torch.randn(5, 12), torch.randn(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(1, 11), WEIGHT), r"linear_rows: input must be \[..., 12\], got \[1, 11\]"),
        ((torch.tensor(1.0), WEIGHT), r"linear_rows: input must be \[..., 12\]"),
        ((ROW, WEIGHT[0]), r"linear_rows: weight must be \[outputs, inputs\]"),
        ((ROW, torch.randn(12, 5).T), r"linear_rows: weight must be contiguous"),
        ((ROW, WEIGHT.char()), r"linear_rows: weight must be float32"),
        ((ROW.bfloat16(), WEIGHT), r"linear_rows: input must be Float, got BFloat16"),
        ((ROW, WEIGHT, BIAS[:4]), r"linear_rows: bias must be \[outputs\]"),
        ((ROW, WEIGHT, BIAS.half()), r"linear_rows: bias must be Float, got Half"),
    ],
)
def test_what_it_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.linear_rows(*arguments)
