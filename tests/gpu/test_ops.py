"""Every op on a CUDA device against the plain references, which run on the CPU."""

import pytest
import reference
import torch
from attention_case import make_case
from torch.library import opcheck

from tests.selections import assert_same_choice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ATOL = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def ops():
    from kvswap_torch import ops

    return ops


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def on_device(*values):
    return [v.cuda() if isinstance(v, torch.Tensor) else v for v in values]


def on_host(values):
    return [v.cpu() for v in values]


def make_summary(batch, blocks, rank, dtype):
    if dtype == torch.int8:
        rows = torch.randint(-127, 128, (batch, blocks, rank, 16), dtype=torch.int8)
        return rows, torch.rand(batch, blocks, 16) + 0.1
    return torch.randn(batch, blocks, rank, 16).to(dtype), None


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 32), (3, 70, 48), (1, 200, 7), (2, 0, 8)])
@pytest.mark.parametrize("queries", [0, 1, 5, 16])
def test_low_rank_score(ops, dtype, shape, queries):
    summary, scale = make_summary(*shape, dtype)
    query = torch.randn(shape[0], queries, shape[2])
    scores = ops.low_rank_score(*on_device(summary, query, scale)).cpu()
    expected = reference.low_rank_score(summary, query, scale)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=2e-3)


def beginning_anywhere(tensor):
    """The same numbers, one element after a place where 16 bytes may be moved at once."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_slice_may_begin_anywhere(ops, dtype):
    keys = torch.randn(2, 2, 40, 64).to(dtype)
    pages, table = ops.pack_records(keys, keys, 4)[0], torch.arange(10).int().view(1, 1, 10)
    summary, _ = make_summary(2, 9, 16, dtype)
    sums, quantized = torch.randn(2, 2, 40), ops.fp8_quantize(keys)
    for call in (
        lambda put: ops.unpack_records(put(pages[None]), 40),
        lambda put: ops.paged_gather(put(pages), table.cuda()),
        lambda put: ops.low_rank_score(put(summary), torch.ones(2, 1, 16).cuda()),
        lambda put: ops.fp8_quantize(put(keys)),
        lambda put: ops.fp8_dequantize(put(quantized[0]), quantized[1].cuda(), dtype),
        lambda put: ops.merge_attention(put(keys), sums.cuda(), put(keys), sums.cuda()),
    ):
        expected, told = call(torch.Tensor.cuda), call(beginning_anywhere)
        torch.testing.assert_close(told, expected, rtol=0, atol=0)


@pytest.mark.parametrize("group_tokens", [1, 3, 4, 8, 16, 63, 64])
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 1000, 70001])
def test_group_max(ops, group_tokens, tokens):
    scores = torch.randn(2, tokens)
    scores[:, 5::11] = float("nan")
    maxima = ops.group_max(scores.cuda(), group_tokens).cpu()
    assert torch.equal(maxima, reference.group_max(scores, group_tokens))


@pytest.mark.parametrize("groups", [0, 1, 50, 5000, 16385, 200000])
@pytest.mark.parametrize("k", [0, 1, 40, 4096])
def test_top_k_groups(ops, groups, k):
    scores = torch.randn(3, groups).mul(4).round()  # many ties
    scores[1, ::2] = float("-inf")
    scores[2, ::7] = float("nan")
    indices, counts = on_host(ops.top_k_groups(scores.cuda(), k))
    clean = torch.where(scores.isnan(), reference.NEVER, scores)
    expected, expected_counts = reference.top_k_groups(clean, k)
    assert torch.equal(indices, expected) and torch.equal(counts, expected_counts)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("group_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize("blocks", [1, 90, 300])
def test_select_groups_is_the_choice_of_its_own_scores(ops, dtype, group_tokens, blocks):
    summary, scale = make_summary(3, blocks, 8, dtype)
    query = torch.randn(3, 8)
    tokens = blocks * 16
    first = torch.tensor([0, 3, tokens])
    last = torch.tensor([tokens, tokens - 5, tokens])
    given = on_device(summary, query, group_tokens, 20, scale, first, last)
    indices, counts = on_host(ops.select_groups(*given))
    scores = ops.low_rank_score(*on_device(summary, query[:, None], scale))[:, 0].cpu()
    for i in range(3):
        scores[i, : first[i]] = scores[i, last[i] :] = reference.NEVER
    expected = reference.top_k_groups(reference.group_max(scores, group_tokens), 20)
    assert torch.equal(indices, expected[0]) and torch.equal(counts, expected[1])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
def test_select_groups_chooses_as_the_cpu_does_up_to_rounding_at_the_threshold(ops, dtype):
    summary, scale = make_summary(4, 2000, 64, dtype)
    query = torch.randn(4, 64)
    chosen, _ = on_host(ops.select_groups(*on_device(summary, query, 4, 400, scale)))
    expected, _ = ops.select_groups(summary, query, 4, 400, scale)
    scores = reference.low_rank_score(summary, query[:, None], scale)[:, 0]
    groups = reference.group_max(scores, 4)
    for i in range(4):
        mine, theirs = chosen[i].tolist(), expected[i].tolist()
        assert_same_choice(mine, theirs, groups[i], 400, absolute=1e-3)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("group_tokens", [1, 3, 4, 64])
@pytest.mark.parametrize("join", ["sum", "max"])
def test_group_mass(ops, dtype, group_tokens, join):
    summary, scale = make_summary(3, 300, 48, dtype)
    query = torch.randn(3, 9, 48) / (100 if dtype == torch.int8 else 1)
    given = on_device(summary, query, group_tokens, join, scale)
    expected = reference.group_mass(summary, query, group_tokens, join, scale)
    torch.testing.assert_close(ops.group_mass(*given).cpu(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("summary_dtype", [None, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64, 4), (2, 2, 37, 80, 32), (2, 4, 600, 128, 48),
                                   (1, 1, 16, 256, 65), (2, 2, 0, 64, 8)])  # fmt: skip
def test_project_keys(ops, dtype, summary_dtype, shape):
    batch, kv_heads, tokens, head_dim, rank = shape
    keys = torch.randn(batch, tokens, kv_heads, head_dim).to(dtype).transpose(1, 2)
    projection = torch.randn(kv_heads * head_dim, rank) / (kv_heads * head_dim) ** 0.5
    summary, scale = on_host(ops.project_keys(*on_device(keys, projection), summary_dtype))
    expected, expected_scale = reference.project_keys(keys, projection, summary_dtype or dtype)
    assert summary.dtype == expected.dtype and summary.shape == expected.shape
    torch.testing.assert_close(scale, expected_scale, rtol=1e-3, atol=1e-6)
    # One unit in the last place: sums in another order may round to the neighbour.
    rtol, atol = {
        torch.int8: (0, 1),
        torch.bfloat16: (2**-7, 1e-2),
        torch.float16: (2**-10, 2e-3),
    }.get(summary.dtype, (2e-5, 2e-3))
    torch.testing.assert_close(summary.float(), expected.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("page_heads", "table_heads"), [(1, 1), (3, 1), (3, 3), (1, 3)])
@pytest.mark.parametrize("pages", [0, 1, 9])
def test_paged_gather(ops, dtype, page_heads, table_heads, pages):
    pool = torch.randn(7, page_heads, 2, 4, 80).to(dtype)
    table = torch.randint(-1, 7, (2, table_heads, pages), dtype=torch.int32)
    keys, values = on_host(ops.paged_gather(*on_device(pool, table)))
    expected = reference.paged_gather(pool, table)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("places", ["cpu cuda", "cuda cpu", "cuda cuda"])
def test_transfer_of_records_between_memories(ops, places, tables):
    source = torch.randn(20, 3, 2, 4, 64).bfloat16()
    target, expected = torch.zeros(2, 50, 3, 2, 4, 64).bfloat16().unbind()
    read = torch.randint(-1, 20, (tables, 30), dtype=torch.int32)
    written = torch.randperm(50)[:30].int().expand(tables, -1)
    first, second = places.split()
    target = target.to(second)
    ops.transfer_records(source.to(first), target, read, written)
    reference.transfer_records(source, expected, read, written)
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_nhd", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize(("tokens", "group_tokens"), [(0, 4), (1, 4), (8, 4), (300, 4), (70, 32)])
def test_records_round_trip(ops, dtype, is_nhd, head_dim, tokens, group_tokens):
    def make():
        if is_nhd:
            return torch.randn(2, tokens, 3, head_dim).to(dtype).transpose(1, 2)
        return torch.randn(2, 3, tokens, head_dim).to(dtype)

    keys, values = make(), make()
    records = ops.pack_records(keys.cuda(), values.cuda(), group_tokens)
    assert torch.equal(records.cpu(), reference.pack_records(keys, values, group_tokens))
    for order in ("hnd", "nhd"):
        back = on_host(ops.unpack_records(records, tokens, order))
        assert torch.equal(back[0], keys) and torch.equal(back[1], values)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("page_heads", "table_heads"), [(3, 1), (1, 3)])
def test_attention_mass(ops, dtype, queries, page_heads, table_heads):
    tables = {"page_heads": page_heads, "table_heads": table_heads}
    *case, scale = make_case(dtype, kv_heads=3, ratio=4, queries=queries, pages=300, **tables)
    _, log_sum_exp = reference.paged_attention(*case, scale)
    actual = on_host(ops.attention_mass(*on_device(*case, log_sum_exp), scale))
    expected = list(reference.attention_mass(*case, log_sum_exp, scale))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_observe_keys(ops, dtype, padded):
    query, keys = torch.randn(2, 8, 32, 80).to(dtype), torch.randn(2, 2, 700, 80).to(dtype)
    valid = torch.arange(700) >= torch.tensor([[90], [0]]) if padded else None
    on_it = None if valid is None else on_device(valid)[0]
    actual = on_host(ops.observe_keys(*on_device(query, keys), 0.1, on_it))
    expected = list(reference.observe_keys(query, keys, 0.1, valid))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 80), (3, 5, 128), (2, 3, 4, 72), (300, 256)])
def test_fp8_round_trip(ops, dtype, shape):
    source = torch.randn(shape) * torch.logspace(-12, 4, shape[-1], base=2)
    if len(shape) > 1 and shape[0]:
        source[0] = 0
    source = source.to(dtype)
    quantized, scales = ops.fp8_quantize(source.cuda())
    expected, expected_scales = reference.fp8_quantize(source)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(quantized.cpu().view(torch.uint8), expected.view(torch.uint8))
    back = ops.fp8_dequantize(quantized, scales, dtype).cpu()
    assert torch.equal(back, reference.fp8_dequantize(expected, expected_scales, dtype))


def check_attention(ops, case):
    output, log_sum_exp = on_host(ops.paged_attention(*on_device(*case)))
    expected, expected_log_sum_exp = reference.paged_attention(*case)
    torch.testing.assert_close(output, expected, rtol=0, atol=ATOL[output.dtype])
    torch.testing.assert_close(log_sum_exp, expected_log_sum_exp, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 3, 8, 16])
def test_attention_head_dims_and_ratios(ops, dtype, head_dim, ratio):
    check_attention(ops, make_case(dtype, head_dim=head_dim, ratio=ratio))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [2, 5, 16])
def test_attention_of_several_queries_is_causal(ops, dtype, queries):
    case = make_case(dtype, queries=queries, ratio=4)
    check_attention(ops, case)
    case[5].fill_(20)
    check_attention(ops, case)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_tokens", [1, 4, 7, 16, 32, 64])
@pytest.mark.parametrize("batch", [1, 9, 64])
def test_attention_group_sizes_and_batches(ops, dtype, group_tokens, batch):
    check_attention(ops, make_case(dtype, batch=batch, group_tokens=group_tokens, pages=40))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("page_heads", "table_heads"), [(3, 1), (3, 3), (1, 3)])
def test_attention_tables_shared_or_per_head(ops, dtype, page_heads, table_heads):
    tables = {"page_heads": page_heads, "table_heads": table_heads}
    check_attention(ops, make_case(dtype, kv_heads=3, ratio=4, pages=300, **tables))


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_that_sees_nothing(ops, dtype):
    case = make_case(dtype, pages=700)
    case[2].fill_(-1)
    output, log_sum_exp = ops.paged_attention(*on_device(*case))
    assert (output == 0).all() and (log_sum_exp == reference.NEVER).all()
    output, log_sum_exp = ops.paged_attention(*on_device(*make_case(dtype, pages=0)))
    assert (output == 0).all() and (log_sum_exp == reference.NEVER).all()


def test_attention_gives_the_same_bits_every_time(ops):
    case = on_device(*make_case(torch.bfloat16, ratio=4, pages=3000))
    first = ops.paged_attention(*case)
    for _ in range(5):
        again = ops.paged_attention(*case)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 5, 80), (2, 3, 4, 128), (300, 72)])
def test_merge_attention(ops, dtype, shape):
    output, other = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    sums, other_sums = torch.randn(shape[:-1]), torch.randn(shape[:-1])
    if len(shape) > 1 and shape[0]:
        sums[0] = reference.NEVER
        other_sums[-1] = reference.NEVER
    merged, total = on_host(ops.merge_attention(*on_device(output, sums, other, other_sums)))
    expected = reference.merge_attention(output, sums, other, other_sums)
    torch.testing.assert_close(merged, expected[0], rtol=0, atol=ATOL[dtype])
    torch.testing.assert_close(total, expected[1], rtol=1e-5, atol=1e-5)


def test_ops_work_on_torchs_current_stream(ops):
    """Inputs are made late on a side stream: an op on another stream would read them too early."""
    case = on_device(*make_case(torch.bfloat16, ratio=4, pages=2000))
    expected = ops.paged_attention(*case)[0].clone()
    pages = case[1].clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(pages)
        torch.cuda._sleep(200_000_000)
        late.copy_(pages)
        output = ops.paged_attention(case[0], late, *case[2:])[0]
        scores = ops.group_max(late.flatten(1).float(), 4)
    side.synchronize()
    assert torch.equal(output, expected)
    assert torch.equal(scores, ops.group_max(pages.flatten(1).float(), 4))


def test_opcheck(ops):
    ops_of = torch.ops.kvswap_torch
    summary, scale = make_summary(2, 3, 8, torch.int8)
    summary, scale, query, scores = on_device(
        summary, scale, torch.randn(2, 4, 8), torch.randn(2, 30)
    )
    opcheck(ops_of.low_rank_score, (summary, query, scale))
    opcheck(ops_of.group_max, (scores, 4))
    opcheck(ops_of.top_k_groups, (scores, 4))
    opcheck(ops_of.select_groups, (summary, query[:, 0].contiguous(), 4, 5, scale))
    keys = torch.randn(2, 3, 20, 64, dtype=torch.bfloat16, device="cuda")
    opcheck(ops_of.project_keys, (keys, torch.randn(192, 8, device="cuda"), torch.int8))
    records = ops.pack_records(keys, keys, 4)
    opcheck(ops_of.pack_records, (keys, keys, 4))
    opcheck(ops_of.unpack_records, (records, 9, "nhd"))
    opcheck(ops_of.fp8_quantize, (keys,))
    opcheck(ops_of.paged_attention, tuple(on_device(*make_case())))
    *case, scale = on_device(*make_case())
    sums = ops.paged_attention(*case, scale)[1]
    opcheck(ops_of.attention_mass, (*case, sums, scale))
    opcheck(ops_of.observe_keys, (keys[:, :, -4:], keys, 0.1))
    table = torch.tensor([[[0, 1, -1]]], dtype=torch.int32, device="cuda")
    opcheck(ops_of.paged_gather, (records[0], table))
    sums = torch.randn(2, 3, 20, device="cuda")
    opcheck(ops_of.merge_attention, (keys, sums, keys, sums))


def test_tensors_on_two_devices_are_refused_by_name(ops):
    scores = torch.randn(2, 3, 8, 16, device="cuda")
    with pytest.raises((ValueError, RuntimeError), match="query must be on cuda|same device"):
        ops.low_rank_score(scores, torch.randn(2, 1, 8))
