"""Records and their way to tensors and back, gathering of pages, fp8."""

import pytest
import reference
import torch
from torch.library import opcheck

from kvswap_torch import ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ops_of = torch.ops.kvswap_torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(4)


def tokens_of(batch, kv_heads, tokens, head_dim, dtype, layout):
    """[batch, kv_heads, tokens, head_dim] in the byte order of `layout`, with a gap after rows."""
    if layout == "hnd":
        return torch.randn(batch, kv_heads, tokens, head_dim).to(dtype)
    if layout == "nhd":
        return torch.randn(batch, tokens, kv_heads, head_dim).to(dtype).transpose(1, 2)
    return torch.randn(batch, kv_heads, tokens, 2 * head_dim).to(dtype)[..., :head_dim]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["hnd", "nhd", "gaps"])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize(("tokens", "group_tokens"), [(0, 4), (1, 4), (8, 4), (300, 4), (70, 32)])
def test_records_round_trip(dtype, layout, head_dim, tokens, group_tokens):
    keys, values = (tokens_of(2, 3, tokens, head_dim, dtype, layout) for _ in range(2))
    records = ops.pack_records(keys, values, group_tokens)
    assert torch.equal(records, reference.pack_records(keys, values, group_tokens))
    for order in ("hnd", "nhd"):
        back = ops.unpack_records(records, tokens, order)
        assert torch.equal(back[0], keys) and torch.equal(back[1], values)
        expected = reference.unpack_records(records, tokens)
        assert torch.equal(back[0], expected[0]) and torch.equal(back[1], expected[1])
    assert ops.unpack_records(records, tokens, "nhd")[0].transpose(1, 2).is_contiguous()


def test_keys_whose_rows_are_not_contiguous():
    keys, values = torch.randn(2, 2, 64, 8).mT, torch.randn(2, 2, 8, 64)
    records = ops.pack_records(keys, values, 4)
    assert torch.equal(records, reference.pack_records(keys, values, 4))
    strided = records.transpose(0, 1)
    assert torch.equal(ops.unpack_records(strided, 8)[1], reference.unpack_records(strided, 8)[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("page_heads", "table_heads"), [(1, 1), (3, 1), (3, 3), (1, 3)])
@pytest.mark.parametrize("pages", [0, 1, 9])
def test_paged_gather(dtype, page_heads, table_heads, pages):
    pool = torch.randn(7, page_heads, 2, 4, 80).to(dtype)
    table = torch.randint(-1, 7, (2, table_heads, pages), dtype=torch.int32)
    keys, values = ops.paged_gather(pool, table)
    expected_keys, expected_values = reference.paged_gather(pool, table)
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 80), (3, 5, 128), (2, 3, 4, 72), (300, 256)])
def test_fp8_round_trip(dtype, shape):
    source = torch.randn(shape) * torch.logspace(-12, 4, shape[-1], base=2)
    if len(shape) > 1 and shape[0]:
        source[0] = 0
    source = source.to(dtype)
    quantized, scales = ops.fp8_quantize(source)
    expected, expected_scales = reference.fp8_quantize(source)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    back = ops.fp8_dequantize(quantized, scales, dtype)
    assert torch.equal(back, reference.fp8_dequantize(quantized, scales, dtype))


def test_fp8_rounds_every_half_as_torch_does():
    """All finite halves against 448, so that the scale is 1 and only rounding is left."""
    halves = torch.arange(0x10000).to(torch.uint16).view(torch.float16)
    halves = halves[halves.abs() <= 448]
    rows = torch.stack([halves, torch.full_like(halves, 448)], 1)
    quantized, scales = ops.fp8_quantize(rows)
    assert (scales == 1).all()
    expected = halves.to(torch.float8_e4m3fn)
    assert torch.equal(quantized[:, 0].view(torch.uint8), expected.view(torch.uint8))


def test_fp8_of_views():
    source = torch.randn(64, 10).T
    quantized, scales = ops.fp8_quantize(source)
    assert torch.equal(
        quantized.view(torch.uint8), reference.fp8_quantize(source)[0].view(torch.uint8)
    )
    back = ops.fp8_dequantize(quantized[::2], scales[::2], torch.bfloat16)
    assert torch.equal(back, reference.fp8_dequantize(quantized[::2], scales[::2], torch.bfloat16))


def test_opcheck():
    keys = tokens_of(2, 3, 10, 64, torch.bfloat16, "nhd")
    records = ops.pack_records(keys, keys, 4)
    opcheck(ops_of.pack_records, (keys, keys, 4))
    opcheck(ops_of.unpack_records, (records, 9))
    opcheck(ops_of.unpack_records, (records, 9, "nhd"))
    table = torch.tensor([[[0, 1, -1]]], dtype=torch.int32)
    opcheck(ops_of.paged_gather, (records[0], table))
    quantized, scales = ops.fp8_quantize(keys)
    opcheck(ops_of.fp8_quantize, (keys,))
    # test_schema cannot compare fp8 inputs: torch has no arithmetic for them.
    others = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    opcheck(ops_of.fp8_dequantize, (quantized, scales, torch.float16), test_utils=others)


KEYS = torch.zeros(1, 2, 8, 64)
RECORDS = torch.zeros(1, 2, 2, 2, 4, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.pack_records(KEYS[0], KEYS[0], 4), r"pack_records: keys must be \[batch"),
        (lambda: ops.pack_records(KEYS, KEYS[:, :1], 4), r"values must be the shape of keys"),
        (lambda: ops.pack_records(KEYS, KEYS.half(), 4), r"values must be Float, got Half"),
        (lambda: ops.pack_records(KEYS, KEYS, 65), r"group_tokens must be 1..64, got 65"),
        (lambda: ops.pack_records(KEYS.long(), KEYS.long(), 4), r"keys must be float32, bfloat16"),
        (lambda: ops.unpack_records(RECORDS, 9), r"unpack_records: tokens must be 0..8, got 9"),
        (
            lambda: ops.unpack_records(RECORDS, 8, "dnh"),
            r'layout must be "hnd" or "nhd", got "dnh"',
        ),
        (
            lambda: ops.paged_gather(RECORDS[0], torch.full((1, 1, 1), 2, dtype=torch.int32)),
            r"paged_gather: slots in table must be -1..1, got 2",
        ),
        (
            lambda: ops.paged_gather(RECORDS[0], torch.zeros(1, 1, 1)),
            r"table must be Int, got Float",
        ),
        (
            lambda: ops.paged_gather(RECORDS[0], torch.zeros(1, 3, 1, dtype=torch.int32)),
            r"table must have one row for all KV heads or one for each of 2, got 3",
        ),
        (lambda: ops.fp8_quantize(KEYS.double()), r"fp8_quantize: source must be float32"),
        (lambda: ops.fp8_quantize(torch.tensor(1.0)), r"got a scalar"),
        (
            lambda: ops.fp8_dequantize(KEYS, KEYS[..., 0], torch.float32),
            r"fp8_dequantize: quantized must be Float8_e4m3fn, got Float",
        ),
        (
            lambda: ops.fp8_dequantize(*ops.fp8_quantize(KEYS), torch.int32),
            r"fp8_dequantize: dtype must be float32",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
