"""Scores, group maxima, TopK, the fused choice and the projection of keys."""

import pytest
import reference
import torch
from torch.library import opcheck

from kvswap_torch import ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ops_of = torch.ops.kvswap_torch


def make_summary(batch, blocks, rank, dtype):
    """A summary of any dtype; with int8 also its scales, else None."""
    if dtype == torch.int8:
        rows = torch.randint(-127, 128, (batch, blocks, rank, 16), dtype=torch.int8)
        return rows, torch.rand(batch, blocks, 16) + 0.1
    return torch.randn(batch, blocks, rank, 16).to(dtype), None


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 32), (3, 70, 48), (1, 200, 7), (2, 0, 8)])
@pytest.mark.parametrize("queries", [0, 1, 5])
def test_low_rank_score(dtype, shape, queries):
    summary, scale = make_summary(*shape, dtype)
    query = torch.randn(shape[0], queries, shape[2])
    scores = ops.low_rank_score(summary, query, scale)
    expected = reference.low_rank_score(summary, query, scale)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=2e-3)


def test_low_rank_score_of_views():
    summary = torch.randn(32, 2, 4, 16).transpose(0, 2)
    query = torch.randn(4, 32, 3).mT
    scores = ops.low_rank_score(summary, query)
    torch.testing.assert_close(
        scores, reference.low_rank_score(summary, query), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("group_tokens", [1, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 1000])
def test_group_max(group_tokens, tokens):
    scores = torch.randn(2, tokens)
    scores[:, 5::11] = float("nan")
    maxima = ops.group_max(scores, group_tokens)
    assert torch.equal(maxima, reference.group_max(scores, group_tokens))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("group_tokens", [1, 3, 4, 64])
@pytest.mark.parametrize("join", ["sum", "max"])
def test_group_mass(dtype, group_tokens, join):
    summary, scale = make_summary(2, 20, 12, dtype)
    query = torch.randn(2, 5, 12) / (100 if dtype == torch.int8 else 1)
    masses = ops.group_mass(summary, query, group_tokens, join, scale)
    expected = reference.group_mass(summary, query, group_tokens, join, scale)
    torch.testing.assert_close(masses, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("groups", [0, 1, 50, 5000])
@pytest.mark.parametrize("k", [0, 1, 40, 4096])
def test_top_k_groups(groups, k):
    scores = torch.randn(3, groups).mul(4).round()  # many ties
    scores[1, ::2] = float("-inf")
    indices, counts = ops.top_k_groups(scores, k)
    expected, expected_counts = reference.top_k_groups(scores, k)
    assert torch.equal(indices, expected)
    assert torch.equal(counts, expected_counts)


def test_top_k_groups_of_a_transposed_tensor():
    scores = torch.randn(100, 3).T
    assert torch.equal(ops.top_k_groups(scores, 7)[0], reference.top_k_groups(scores, 7)[0])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("group_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize("blocks", [1, 90, 300])
def test_select_groups(dtype, group_tokens, blocks):
    summary, scale = make_summary(3, blocks, 8, dtype)
    query = torch.randn(3, 8)
    tokens = blocks * 16
    first = torch.tensor([0, 3, tokens])
    last = torch.tensor([tokens, tokens - 5, tokens])
    chosen = ops.select_groups(summary, query, group_tokens, 20, scale, first, last)
    scores = ops.low_rank_score(summary, query[:, None], scale)[:, 0]  # the same rounding
    for i in range(3):
        scores[i, : first[i]] = scores[i, last[i] :] = reference.NEVER
    expected = reference.top_k_groups(reference.group_max(scores, group_tokens), 20)
    assert torch.equal(chosen[0], expected[0])
    assert torch.equal(chosen[1], expected[1])
    assert chosen[1][2] == 0, "no token counts in the last sequence"


def test_select_groups_takes_all_tokens_unless_told():
    summary, query = torch.randn(2, 5, 4, 16), torch.randn(2, 4)
    chosen = ops.select_groups(summary, query, 4, 6)
    assert torch.equal(chosen[0], reference.select_groups(summary, query, 4, 6)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("summary_dtype", [None, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64, 4), (2, 2, 37, 80, 32), (2, 4, 600, 128, 48),
                                   (1, 1, 16, 256, 65), (2, 2, 0, 64, 8)])  # fmt: skip
def test_project_keys(dtype, summary_dtype, shape):
    batch, kv_heads, tokens, head_dim, rank = shape
    keys = torch.randn(batch, tokens, kv_heads, head_dim).to(dtype).transpose(1, 2)
    projection = torch.randn(kv_heads * head_dim, rank) / (kv_heads * head_dim) ** 0.5
    summary, scale = ops.project_keys(keys, projection, summary_dtype)
    expected, expected_scale = reference.project_keys(keys, projection, summary_dtype or dtype)
    assert summary.dtype == expected.dtype and summary.shape == expected.shape
    assert scale.shape == expected_scale.shape
    torch.testing.assert_close(scale, expected_scale, rtol=1e-3, atol=1e-6)
    step = 1 if summary.dtype == torch.int8 else 1e-2 if summary.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(summary.float(), expected.float(), rtol=step / 100, atol=step)


def test_opcheck():
    summary, scale = make_summary(2, 3, 8, torch.int8)
    query = torch.randn(2, 4, 8)
    bounds = torch.tensor([0, 5]), torch.tensor([48, 40])
    opcheck(ops_of.low_rank_score, (summary, query, scale))
    opcheck(ops_of.group_max, (torch.randn(2, 30), 4))
    opcheck(ops_of.group_mass, (summary, query, 4, "max", scale))
    opcheck(ops_of.group_mass, (torch.randn(2, 3, 8, 16), query, 4))
    opcheck(ops_of.top_k_groups, (torch.randn(2, 30), 4))
    opcheck(ops_of.select_groups, (summary, query[:, 0], 4, 5, scale, *bounds))
    opcheck(ops_of.select_groups, (torch.randn(2, 3, 8, 16), query[:, 0], 4, 5))
    for dtype in (None, torch.int8):
        keys = torch.randn(2, 3, 20, 64, dtype=torch.bfloat16)
        opcheck(ops_of.project_keys, (keys, torch.randn(192, 8), dtype))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, q: ops.low_rank_score(s[..., :8], q), r"low_rank_score: summary must be .*16"),
        (lambda s, q: ops.low_rank_score(s, q[..., :4]), r"low_rank_score: query must be .*rank"),
        (
            lambda s, q: ops.low_rank_score(s[:, :, :0], q[..., :0]),
            r"low_rank_score: rank must be 1..2147483647, got 0",
        ),
        (
            lambda s, q: ops.group_mass(s[:, :, :0], q[..., :0], 4),
            r"rank must be 1..2147483647, got 0",
        ),
        (
            lambda s, q: ops.select_groups(s[:, :, :0], q[:, 0, :0], 4, 1),
            r"rank must be 1..2147483647, got 0",
        ),
        (lambda s, q: ops.low_rank_score(s, q.double()), r"query must be Float, got Double"),
        (lambda s, q: ops.low_rank_score(s.double(), q), r"must be float32, bfloat16 or float16"),
        (lambda s, q: ops.low_rank_score(s.char(), q), r"token_scale must be given with an int8"),
        (lambda s, q: ops.low_rank_score(s, q, s[:, :, 0]), r"only then, got one for Float"),
        (lambda s, q: ops.group_max(q[0], 0), r"group_max: group_tokens must be 1..64, got 0"),
        (lambda s, q: ops.group_max(q, 4), r"group_max: scores must be \[batch, tokens\]"),
        (lambda s, q: ops.top_k_groups(q[0], -1), r"top_k_groups: k must be 0.., got -1"),
        (lambda s, q: ops.group_mass(s, q[:, 0], 4), r"group_mass: query must be .*heads, rank"),
        (lambda s, q: ops.group_mass(s, q, 4, "mean"), r"join must be sum or max, got mean"),
        (lambda s, q: ops.select_groups(s, q[:, 0], 65, 1), r"group_tokens must be 1..64, got 65"),
        (
            lambda s, q: ops.select_groups(s, q[:, 0], 4, 1, None, torch.tensor([0, 49])),
            r"select_groups: first_tokens must be 0..48, got 49",
        ),
        (
            lambda s, q: ops.project_keys(torch.randn(1, 2, 3, 64), torch.randn(64, 8)),
            r"project_keys: projection must be .* = \[128, -1\] .*got \[64, 8\]",
        ),
        (
            lambda s, q: ops.project_keys(
                torch.randn(1, 1, 3, 64), torch.randn(64, 8), torch.float64
            ),
            r"project_keys: summary \(unless int8\) must be float32",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message.replace("0..,", "0..2147483647,")):
        call(torch.randn(2, 3, 8, 16), torch.randn(2, 4, 8))
