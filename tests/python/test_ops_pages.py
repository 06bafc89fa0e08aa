"""Records between pools of pages, and the cache's own e4m3 form of them."""

import pytest
import reference
import torch
from torch.library import opcheck

from kvswap_torch import ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ops_of = torch.ops.kvswap_torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def bits(tensor):
    return tensor.view(torch.uint8)


def slots_of(*rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 7, 40])
@pytest.mark.parametrize(
    ("tables", "source_heads", "target_heads"), [(1, 3, 3), (3, 3, 3), (3, 3, 1), (3, 1, 3)]
)
def test_transfer(dtype, count, tables, source_heads, target_heads):
    source = (100 * torch.randn(9, source_heads, 2, 4, 24)).to(dtype)
    target = torch.zeros(130, target_heads, 2, 4, 24, dtype=dtype)
    read = torch.randint(-1, 9, (tables, count), dtype=torch.int32)
    written = torch.randperm(130)[: tables * count].int().view(tables, count)
    written[torch.rand(tables, count) < 0.2] = -1
    expected = target.clone()
    reference.transfer_records(source, expected, read, written)
    ops.transfer_records(source, target, read, written)
    assert torch.equal(target, expected)
    assert count < 7 or target.any()


def test_transfer_of_views():
    source = torch.randn(9, 2, 3, 4, 8).transpose(1, 2)[::2]
    target, expected = torch.zeros(2, 6, 3, 2, 4, 8).unbind()
    read, written = torch.tensor([[0, 1], [3, 4]], dtype=torch.int32).T[:1], slots_of([5, 0])
    ops.transfer_records(source, target, read, written)
    reference.transfer_records(source, expected, read, written)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 2, 4, 16), (0, 2, 2, 4, 16), (5, 3, 2, 7, 72)])
def test_records_in_e4m3(dtype, shape):
    source = torch.randn(shape) * torch.logspace(-9, 5, shape[-1], base=2)
    if shape[0]:
        source[0] = 0
        source[-1, ..., 0, 0, :4] = torch.tensor([float("inf"), float("nan"), 1e-30, 3e4])
    source = source.to(dtype)
    encoded, exponents = ops.encode_records(source)
    expected, powers = reference.encode_records(source)
    assert torch.equal(exponents, powers)
    is_number = ~expected.float().isnan()
    assert torch.equal(encoded.float().isnan(), ~is_number)
    assert torch.equal(bits(encoded)[is_number], bits(expected)[is_number])
    back = ops.decode_records(encoded, exponents, dtype)
    torch.testing.assert_close(
        back, reference.decode_records(encoded, exponents, dtype), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(
        back, reference.float8_rounded(source), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_was_decoded_is_encoded_without_a_change(dtype):
    source = torch.randn(4, 2, 2, 8, 32).to(dtype)
    once = ops.decode_records(*ops.encode_records(source), dtype)
    again = ops.decode_records(*ops.encode_records(once), dtype)
    assert torch.equal(once, again) and not torch.equal(once, source)
    strided = source.transpose(0, 1)
    assert torch.equal(ops.encode_records(strided)[1], ops.encode_records(strided.contiguous())[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 4, 16), (0, 2, 2, 4, 16), (5, 3, 2, 7, 96), (3, 2, 2, 8, 128), (2, 1, 2, 1, 64)],
)
def test_records_in_int4(dtype, shape):
    source = torch.randn(shape) * torch.logspace(-6, 4, shape[-1], base=2) + torch.randn(shape[-1])
    source = source.to(dtype)
    if shape[0]:
        source[0] = 0
        source[-1, ..., 0, 0, 1] = float("inf")
        source[-1, ..., 1, 0, 2] = float("nan")
    encoded = ops.encode_int4_records(source)
    assert torch.equal(encoded, reference.encode_int4_records(source))
    tokens, head_dim = shape[-2:]
    back = ops.decode_int4_records(encoded, tokens, head_dim, dtype)
    expected = reference.decode_int4_records(encoded, tokens, head_dim, dtype)
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)
    strided = source.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(ops.encode_int4_records(strided), encoded)
    assert back.shape == source.shape and back.dtype == dtype


def test_int4_is_a_tenth_off_and_e4m3_less():
    source = torch.randn(64, 8, 2, 8, 128)
    back = ops.decode_int4_records(ops.encode_int4_records(source), 8, 128, torch.float32)
    finer = ops.decode_records(*ops.encode_records(source), torch.float32)
    error, less = ((found - source).norm() / source.norm() for found in (back, finer))
    assert 0.05 < error < 0.11 and less < 0.5 * error


def test_opcheck():
    source, target = torch.randn(3, 2, 2, 4, 8), torch.zeros(5, 2, 2, 4, 8)
    opcheck(ops_of.transfer_records, (source, target, slots_of([0, 2]), slots_of([4, 1])))
    encoded, exponents = ops.encode_records(source)
    opcheck(ops_of.encode_records, (source,))
    # test_schema cannot compare fp8 inputs: torch has no arithmetic for them.
    others = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    opcheck(ops_of.decode_records, (encoded, exponents, torch.float16), test_utils=others)


def test_opcheck_of_int4():
    source = torch.randn(3, 2, 2, 4, 48)
    opcheck(ops_of.encode_int4_records, (source,))
    encoded = ops.encode_int4_records(source)
    opcheck(ops_of.decode_int4_records, (encoded, 4, 48, torch.float16))


PAGES = torch.zeros(3, 2, 2, 4, 8)
SWAPPED = PAGES.transpose(0, 1).contiguous().transpose(0, 1)
ONE = slots_of([0])
EACH = slots_of([0], [0], [0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.transfer_records(PAGES[0], PAGES, ONE, ONE), r"source must be \[slots, kv_h"),
        (lambda: ops.transfer_records(PAGES, PAGES[..., :4], ONE, ONE), r"target must be \[slots"),
        (lambda: ops.transfer_records(PAGES, PAGES.half(), ONE, ONE), "target must be Float"),
        (
            lambda: ops.transfer_records(PAGES, SWAPPED, ONE, ONE),
            "target must be contiguous, since it is written in place",
        ),
        (lambda: ops.transfer_records(PAGES, PAGES, ONE.long(), ONE), "source_slots must be Int"),
        (
            lambda: ops.transfer_records(PAGES, PAGES, ONE, slots_of([0, 1])),
            "target_slots must be the shape of source_slots",
        ),
        (
            lambda: ops.transfer_records(PAGES, PAGES, slots_of([3]), ONE),
            "transfer_records: source_slots must be -1..2, got 3",
        ),
        (
            lambda: ops.transfer_records(PAGES, PAGES, slots_of([0, 1]), slots_of([2, 2])),
            "target_slots must name each slot once, got 2 twice",
        ),
        (
            lambda: ops.transfer_records(PAGES, PAGES, EACH, EACH),
            "source_slots must have one row for all KV heads or one for each of 2, got 3",
        ),
        (
            lambda: ops.transfer_records(PAGES, PAGES[:, :1].contiguous(), ONE, ONE),
            "target must have 2 KV heads, or one and a row of slots for each, got 1 and 1",
        ),
        (
            lambda: ops.encode_int4_records(PAGES),
            "encode_int4_records: head_dim must be a multiple of 16, got 8",
        ),
        (
            lambda: ops.decode_int4_records(torch.zeros(2, 35).byte(), 2, 16, torch.half),
            "encoded must have 45 bytes for each KV head of 2 tokens of 16, got 35",
        ),
        (
            lambda: ops.decode_int4_records(PAGES, 2, 16, torch.half),
            "decode_int4_records: encoded must be Byte, got Float",
        ),
        (lambda: ops.encode_records(PAGES[:, :, :1]), r"records must be \[\.\.\., kv_heads, 2, gr"),
        (lambda: ops.encode_records(PAGES.double()), "encode_records: records must be float32"),
        (
            lambda: ops.decode_records(PAGES, ONE, torch.float32),
            "decode_records: encoded must be Float8_e4m3fn, got Float",
        ),
        (
            lambda: ops.decode_records(ops.encode_records(PAGES)[0], ONE, torch.float32),
            "exponents must be Char, got Int",
        ),
        (
            lambda: ops.decode_records(
                ops.encode_records(PAGES)[0], torch.full((3, 2, 2), 8, dtype=torch.int8), torch.half
            ),
            "exponents must be -15..7, got 8",
        ),
        (
            lambda: ops.decode_records(*ops.encode_records(PAGES), torch.int32),
            "decode_records: dtype must be float32",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
