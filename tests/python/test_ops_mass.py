"""The attention that keys get: of a page table's slots, and of a chunk's own tokens."""

import os

import pytest
import reference
import torch
from attention_case import make_case
from torch.library import opcheck

from kvswap_torch import ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {"rtol": 1e-4, "atol": 2e-6}
ops_of = torch.ops.kvswap_torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def massed(case, log_sum_exp=None):
    """Arguments of attention_mass: a case of paged_attention and what that leaves."""
    *tensors, scale = case
    if log_sum_exp is None:
        log_sum_exp = ops.paged_attention(*case)[1]
    return (*tensors, log_sum_exp, scale)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"ratio": 8, "queries": 5, "head_dim": 72},
        {"kv_heads": 3, "page_heads": 1, "table_heads": 3, "ratio": 4},
        {"group_tokens": 64, "pages": 9, "head_dim": 256},
        {"group_tokens": 1, "pages": 1100, "batch": 1},
        {"batch": 0},
        {"pages": 0},
    ],
    ids=str,
)
def test_mass_is_the_references(dtype, shape):
    arguments = massed(make_case(dtype, **shape))
    mean, square = ops.attention_mass(*arguments)
    expected, expected_square = reference.attention_mass(*arguments)
    assert mean.dtype == square.dtype == torch.float32
    torch.testing.assert_close(mean, expected, **CLOSE)
    torch.testing.assert_close(square, expected_square, **CLOSE)


def test_means_of_a_head_sum_to_one_and_a_share_of_more_to_less():
    case = make_case(ratio=4, queries=3)
    arguments = massed(case)
    mean, _ = ops.attention_mass(*arguments)
    torch.testing.assert_close(mean.sum(-1), torch.ones(2, 2))
    halved, _ = ops.attention_mass(*massed(case, arguments[6] + torch.tensor(2.0).log()))
    torch.testing.assert_close(halved, mean / 2)


def test_capped_scores_are_weighed_as_they_are_attended():
    *tensors, scale = make_case(ratio=4, queries=3)
    sums = ops.paged_attention(*tensors, scale, 0.7)[1]
    actual = ops.attention_mass(*tensors, sums, scale, 0.7)
    torch.testing.assert_close(actual[0].sum(-1), torch.ones(2, 2))
    expected = reference.attention_mass(*tensors, sums, scale, 0.7)
    torch.testing.assert_close(actual, expected, **CLOSE)
    query, keys, scale = chunk()
    actual = ops.observe_keys(query, keys, scale, softcap=0.7)
    expected = reference.observe_keys(query, keys, scale, softcap=0.7)
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_queries_that_see_nothing_pay_nothing():
    case = make_case()
    case[2].fill_(-1)
    mean, square = ops.attention_mass(*massed(case))
    assert (mean == 0).all() and (square == 0).all()


def chunk(dtype=torch.float32, batch=2, kv_heads=2, ratio=2, queries=8, tokens=70, head_dim=64):
    query = torch.randn(batch, queries, kv_heads * ratio, head_dim).to(dtype).transpose(1, 2)
    keys = torch.randn(batch, tokens, kv_heads, head_dim).to(dtype).transpose(1, 2)
    return query, keys, head_dim**-0.5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"queries": 64, "tokens": 64}, {"ratio": 3, "tokens": 1100, "head_dim": 80}, {"batch": 0}],
    ids=str,
)
def test_a_chunks_mass_is_the_references(dtype, shape, padded):
    query, keys, scale = chunk(dtype, **shape)
    valid = None
    if padded:
        valid = torch.arange(keys.shape[2]) >= torch.tensor([23, 0])[: len(keys), None]
    actual = ops.observe_keys(query, keys, scale, valid)
    expected = reference.observe_keys(query, keys, scale, valid)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    if not padded and len(keys):
        torch.testing.assert_close(actual[0].sum(-1), torch.ones(2, 2))


def test_a_chunk_after_others_has_their_share_taken_off():
    query, keys, scale = chunk()
    log_sum_exp = torch.rand(query.shape[:3]) + 6
    actual = ops.observe_keys(query, keys, scale, log_sum_exp=log_sum_exp)
    expected = reference.observe_keys(query, keys, scale, log_sum_exp=log_sum_exp)
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_threads_do_not_change_a_bit():
    case, pieces = massed(make_case(batch=3, ratio=4, pages=700)), chunk(tokens=2000)
    threads = torch.get_num_threads()
    results = []
    for count in range(1, min(5, len(os.sched_getaffinity(0))) + 1):
        torch.set_num_threads(count)
        results.append((*ops.attention_mass(*case), *ops.observe_keys(*pieces)))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_wrong_arguments_are_refused_by_name():
    case = massed(make_case())
    with pytest.raises(ValueError, match="attention_mass: log_sum_exp must be"):
        ops.attention_mass(*case[:6], case[6][:, :1], case[7])
    with pytest.raises(ValueError, match="attention_mass: query must be"):
        ops.attention_mass(case[0][..., :1], *case[1:])
    query, keys, scale = chunk()
    with pytest.raises(ValueError, match="observe_keys: queries must be 1..5"):
        ops.observe_keys(query, keys[:, :, :5], scale)
    with pytest.raises(ValueError, match="observe_keys: heads must be a multiple"):
        ops.observe_keys(query[:, :3], keys, scale)
    with pytest.raises(ValueError, match="observe_keys: valid must be"):
        ops.observe_keys(query, keys, scale, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="observe_keys: keys must be"):
        ops.observe_keys(query, keys.half(), scale)


def test_opcheck():
    opcheck(ops_of.attention_mass, massed(make_case()))
    query, keys, scale = chunk()
    opcheck(ops_of.observe_keys, (query, keys, scale))
    valid = torch.ones(2, 70, dtype=torch.bool)
    opcheck(ops_of.observe_keys, (query, keys, scale, valid, torch.ones(query.shape[:3])))
