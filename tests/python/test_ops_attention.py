"""Paged attention and the merge of two attentions."""

import os

import pytest
import reference
import torch
from attention_case import make_case
from torch.library import opcheck

from kvswap_torch import ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ATOL = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
ops_of = torch.ops.kvswap_torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def check(case):
    output, log_sum_exp = ops.paged_attention(*case)
    expected, expected_log_sum_exp = reference.paged_attention(*case)
    assert output.dtype == case[0].dtype and log_sum_exp.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0, atol=ATOL[output.dtype])
    torch.testing.assert_close(log_sum_exp, expected_log_sum_exp, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 3, 8, 16])
def test_head_dims_and_ratios(dtype, head_dim, ratio):
    check(make_case(dtype, head_dim=head_dim, ratio=ratio))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [2, 5, 16])
def test_several_queries_are_causal(dtype, queries):
    case = make_case(dtype, queries=queries, ratio=4)
    check(case)
    case[5].fill_(20)  # the chunk stands in the middle of the pages
    check(case)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("pages", [3, 1100])
def test_capped_scores_and_sinks(dtype, queries, pages):
    case = make_case(dtype, queries=queries, pages=pages, ratio=4)
    sinks = torch.linspace(-3, 6, case[0].shape[1])
    check((*case, 2.0))
    check((*case, 0.0, sinks))
    check((*case, 0.5, sinks))
    case[2][0] = -1  # all weight is the sinks'
    check((*case, 0.5, sinks))


@pytest.mark.parametrize("group_tokens", [1, 4, 7, 16, 32, 64])
def test_group_sizes(group_tokens):
    check(make_case(group_tokens=group_tokens, pages=9))


@pytest.mark.parametrize(("page_heads", "table_heads"), [(3, 1), (3, 3), (1, 3)])
def test_tables_shared_or_per_head(page_heads, table_heads):
    check(make_case(kv_heads=3, page_heads=page_heads, table_heads=table_heads, ratio=4))


@pytest.mark.parametrize("batch", [1, 9])
def test_many_pages(batch):
    check(make_case(batch=batch, pages=1100))


def test_one_token():
    query, pool, table, masks, positions, query_positions, scale = make_case(pages=1)
    table.zero_()
    masks.fill_(0b0100)
    output, _ = ops.paged_attention(query, pool, table, masks, positions, query_positions, scale)
    expected = pool[0, :, 1, 2].repeat_interleave(2, 0)
    torch.testing.assert_close(output, expected.expand(2, 1, 4, 64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_selections_give_zeros(dtype):
    case = make_case(dtype)
    case[2].fill_(-1)
    output, log_sum_exp = ops.paged_attention(*case)
    assert (output == 0).all() and (log_sum_exp == reference.NEVER).all()
    output, log_sum_exp = ops.paged_attention(*make_case(dtype, pages=0))
    assert (output == 0).all() and (log_sum_exp == reference.NEVER).all()
    assert ops.paged_attention(*make_case(dtype, batch=0))[0].shape == (0, 1, 4, 64)


def test_views_of_every_argument():
    query, pool, table, masks, positions, query_positions, scale = make_case()
    doubled = torch.cat([query, query], 1)[:, ::2]
    arguments = (doubled, pool.flip(0).flip(0), table, masks, positions, query_positions)
    strided = [torch.stack([x, x], -1)[..., 0] for x in arguments]
    assert not any(x.is_contiguous() for x in strided)
    torch.testing.assert_close(
        ops.paged_attention(*strided, scale), ops.paged_attention(*arguments, scale)
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_as_torch_attention_over_everything(dtype):
    """All tokens valid and visible: nothing but scaled_dot_product_attention with GQA is left."""
    query, pool, table, masks, positions, query_positions, scale = make_case(dtype, ratio=4)
    table.clamp_(min=0)
    masks.fill_(-1)
    output, _ = ops.paged_attention(query, pool, table, masks, positions, query_positions, scale)
    keys, values = ops.paged_gather(pool, table)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(output.transpose(1, 2), expected, rtol=0, atol=ATOL[dtype])


def test_threads_do_not_change_a_bit():
    case = make_case(batch=3, ratio=4, pages=700)
    threads = torch.get_num_threads()
    results = []
    for count in range(1, min(5, len(os.sched_getaffinity(0))) + 1):
        torch.set_num_threads(count)
        results.append(ops.paged_attention(*case))
    torch.set_num_threads(threads)
    for output, log_sum_exp in results[1:]:
        assert torch.equal(output, results[0][0]) and torch.equal(log_sum_exp, results[0][1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 5, 80), (2, 3, 4, 128), (300, 72)])
def test_merge_attention(dtype, shape):
    output, other = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    log_sum_exp, other_log_sum_exp = torch.randn(shape[:-1]), torch.randn(shape[:-1])
    if len(shape) > 1 and shape[0]:
        log_sum_exp[0] = reference.NEVER
        other_log_sum_exp[-1] = reference.NEVER
    merged, total = ops.merge_attention(output, log_sum_exp, other, other_log_sum_exp)
    expected = reference.merge_attention(output, log_sum_exp, other, other_log_sum_exp)
    torch.testing.assert_close(merged, expected[0], rtol=0, atol=ATOL[dtype])
    torch.testing.assert_close(total, expected[1])


def test_merge_of_two_empty_sides_is_empty():
    never = torch.full((3,), reference.NEVER)
    garbage = torch.full((3, 64), float("nan"))
    output, total = ops.merge_attention(garbage, never, garbage, never)
    assert (output == 0).all() and (total == reference.NEVER).all()


def test_merged_halves_are_the_whole():
    case = make_case(ratio=4, pages=20)
    whole, whole_log_sum_exp = ops.paged_attention(*case)
    sides = []
    for part in (slice(0, 9), slice(9, 20)):
        cut = [x[:, :, part] for x in case[2:5]]
        output, log_sum_exp = ops.paged_attention(*case[:2], *cut, *case[5:])
        sides += [output, log_sum_exp.transpose(1, 2)]
    output, log_sum_exp = ops.merge_attention(*sides)
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(log_sum_exp.transpose(1, 2), whole_log_sum_exp)


def test_opcheck():
    opcheck(ops_of.paged_attention, make_case(torch.bfloat16, queries=3))
    opcheck(ops_of.paged_attention, (*make_case(), 2.0, torch.ones(4)))
    opcheck(ops_of.paged_attention, make_case(kv_heads=3, page_heads=1, table_heads=3))
    sides = torch.randn(5, 64), torch.randn(5)
    opcheck(ops_of.merge_attention, (*sides, *sides))


def changed(position, change):
    case = list(make_case())
    case[position] = change(case[position])
    return lambda: ops.paged_attention(*case)


def merge(*shapes, other_dtype=torch.float32):
    output, log_sum_exp, other, other_log_sum_exp = (torch.zeros(shape) for shape in shapes)
    return lambda: ops.merge_attention(
        output, log_sum_exp, other.to(other_dtype), other_log_sum_exp
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (changed(0, lambda q: q[..., :32]), r"paged_attention: query must be .*head_dim\]"),
        (changed(0, lambda q: q.half()), r"query must be Float, got Half"),
        (changed(0, lambda q: q[:, :3]), r"heads must be a multiple of 2 KV heads, got 3"),
        (changed(0, lambda q: q.repeat(1, 1, 17, 1)), r"queries must be 1..16, got 17"),
        (changed(1, lambda p: p[:, :0]), r"paged_attention: kv_heads must be 1..2147483647, got 0"),
        (changed(1, lambda p: p[:, :, :1]), r"pages must be \[slots, kv_heads, 2"),
        (changed(1, lambda p: p.double()), r"pages must be float32, bfloat16 or float16"),
        (changed(2, lambda t: t + 100), r"slots in table must be -1..24, got"),
        (changed(2, lambda t: t.long()), r"table must be Int, got Long"),
        (changed(3, lambda m: m[..., 1:]), r"masks must be the shape of table"),
        (changed(3, lambda m: m.int()), r"masks must be Long, got Int"),
        (changed(4, lambda c: c[:1]), r"positions must be the shape of table"),
        (changed(5, lambda c: c[:1]), r"query_positions must be \[batch\]"),
        (merge((2, 8), (2,), (2, 4), (2,)), r"other_output must be the shape of output"),
        (merge((2, 8), (3,), (2, 8), (2,)), r"merge_attention: log_sum_exp must be the shape of"),
        (merge((2, 8), (2,), (2, 8), (1,)), r"other_log_sum_exp must be the shape of"),
        (
            merge((2, 8), (2,), (2, 8), (2,), other_dtype=torch.half),
            r"other_output must be Float, got Half",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
