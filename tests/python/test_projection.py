"""Projections: their optimality, few samples, their file, and what estimates look at."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvswap_torch import ConfigError, ModelIdentity
from kvswap_torch.projection import (
    from_chunk,
    leading_svd,
    query_aware,
    sum_over_heads,
    svd_keys,
)
from kvswap_torch.projection_file import load_projections, save_projections

WIDTH = 24


def samples(count: int, width: int = WIDTH, seed: int = 0, offset: float = 0.0) -> torch.Tensor:
    """Vectors whose energy falls from direction to direction, around an offset."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    falling = 0.7 ** torch.arange(width)
    return (torch.randn(count, width, generator=generator) * falling) @ mix + offset


def score_error(pair, keys, queries) -> float:
    """Error of q . k, up to a constant per query: that moves all tokens alike."""
    key, query = pair
    error = queries @ keys.T - (queries @ query) @ (keys @ key).T
    return (error - error.mean(1, keepdim=True)).square().mean().item()


def test_svd_keys_is_the_svd_of_the_keys():
    keys = samples(500)
    key, query = svd_keys(keys, 5)
    assert key is query
    _, _, right = torch.linalg.svd(keys, full_matrices=False)
    torch.testing.assert_close(key @ key.T, right[:5].T @ right[:5], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(key.T @ key, torch.eye(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [2, 4, 8, 16])
def test_query_aware_beats_the_keys_alone(rank):
    keys, queries = samples(600, seed=1, offset=0.5), samples(600, seed=2)
    ours = score_error(query_aware(keys, queries, rank), keys, queries)
    assert ours < 0.8 * score_error(svd_keys(keys, rank), keys, queries)
    # The best any projection can do: the SVD of all the scores.
    centred = keys - keys.mean(0)
    values = torch.linalg.svdvals(queries @ centred.T)
    best, all_of_it = values[rank:].square().sum() / 600**2, values.square().sum() / 600**2
    assert ours <= 1.1 * best + 1e-6 * all_of_it


def test_full_rank_is_exact():
    keys, queries = samples(200, seed=3, offset=2.0), samples(200, seed=4)
    for pair in (query_aware(keys, queries, WIDTH), svd_keys(keys, WIDTH)):
        torch.testing.assert_close((queries @ pair[1]) @ (keys @ pair[0]).T, queries @ keys.T,
                                   atol=1e-3, rtol=1e-3)  # fmt: skip


@given(keys=st.integers(1, 40), queries=st.integers(1, 40), rank=st.integers(1, WIDTH))
def test_any_number_of_samples(keys, queries, rank):
    """Fewer samples than dimensions, one sample, or zeros: finite, and good on what was seen."""
    seen, asked = samples(keys, seed=5), samples(queries, seed=6)
    for pair in (query_aware(seen, asked, rank), svd_keys(seen, rank)):
        assert all(m.shape == (WIDTH, rank) and torch.isfinite(m).all() for m in pair)
    nothing = torch.zeros(keys, WIDTH)
    for pair in (query_aware(nothing, asked, rank), query_aware(seen, torch.zeros(3, WIDTH), rank)):
        assert all(torch.isfinite(m).all() for m in pair)


def test_a_prefix_of_columns_is_the_smaller_rank():
    keys, queries = samples(300, seed=7), samples(300, seed=8)
    for make in (lambda r: query_aware(keys, queries, r), lambda r: svd_keys(keys, r)):
        wide, narrow = make(12), make(5)
        for ours, theirs in zip(wide, narrow, strict=True):
            signs = (ours[:, :5] * theirs).sum(0).sign()
            torch.testing.assert_close(ours[:, :5] * signs, theirs, atol=1e-3, rtol=1e-3)


def test_subspace_iteration_finds_the_leading_triplets():
    matrix = samples(300, 256, seed=9).T @ samples(300, 256, seed=10)
    left, weights, right = leading_svd(matrix, 10)  # few of many: iterated
    exact = torch.linalg.svd(matrix)
    torch.testing.assert_close(weights, exact.S[:10], rtol=1e-3, atol=1e-3)
    low_rank = (left * weights) @ right.T
    expected = (exact.U[:, :10] * exact.S[:10]) @ exact.Vh[:10]
    torch.testing.assert_close(low_rank, expected, atol=1e-2 * exact.S[0].item(), rtol=1e-2)


def test_estimates_do_not_touch_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    leading_svd(torch.eye(256), 4)
    from_chunk("query_aware", torch.ones(1, 2, 50, 128), torch.ones(1, 4, 50, 128), 8)
    assert torch.equal(torch.rand(4), expected)


def test_sum_over_heads_groups_neighbours():
    query = torch.arange(2 * 4 * 3 * 5.0).view(2, 4, 3, 5)
    summed = sum_over_heads(query, 2)
    assert summed.shape == (6, 10)
    torch.testing.assert_close(summed[4, :5], query[1, 0, 1] + query[1, 1, 1])
    torch.testing.assert_close(summed[4, 5:], query[1, 2, 1] + query[1, 3, 1])


@pytest.mark.parametrize("kind", ["query_aware", "svd_keys"])
@pytest.mark.parametrize("tokens", [1, 7, 600, 3000])
def test_estimates_from_chunks(kind, tokens):
    keys = samples(2 * 2 * tokens, 8, seed=11).view(2, 2, tokens, 8)
    query = samples(2 * 4 * tokens, 8, seed=12).view(2, 4, tokens, 8)
    valid = torch.ones(2, tokens, dtype=torch.bool)
    for mask in (None, valid):
        pair = from_chunk(kind, keys, query, 6, mask)
        assert all(m.shape == (16, 6) and torch.isfinite(m).all() for m in pair)
    without = from_chunk(kind, keys, None, 6)
    assert without[0] is without[1]


def test_estimates_do_not_see_padding():
    keys, query = torch.randn(1, 2, 64, 8), torch.randn(1, 4, 64, 8)
    valid = torch.ones(1, 64, dtype=torch.bool)
    valid[:, :20] = False
    expected = from_chunk("query_aware", keys, query, 6, valid)
    keys[:, :, :20], query[:, :, :20] = 1e4, -1e4
    for ours, theirs in zip(
        from_chunk("query_aware", keys, query, 6, valid), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_bad_samples():
    with pytest.raises(ValueError, match=r"svd_keys: samples must be \[count >= 1, width\]"):
        svd_keys(torch.zeros(0, 4), 2)
    with pytest.raises(ValueError, match="query_aware: rank must be 1 to 4, got 5"):
        query_aware(torch.zeros(3, 4), torch.zeros(3, 4), 5)


# Its file.

MODEL = ModelIdentity(model_type="qwen3", layers=2, kv_heads=2, head_dim=12, dtype="bfloat16")


@pytest.fixture
def saved(tmp_path):
    keys, queries = samples(100), samples(100, seed=1)
    pairs = [query_aware(keys, queries, 8), svd_keys(keys, 6)]
    save_projections(tmp_path / "p.safetensors", pairs, kind="query_aware", model=MODEL)
    return tmp_path / "p.safetensors", pairs


def test_file_round_trip_and_smaller_ranks(saved):
    path, pairs = saved
    loaded = load_projections(path, (8, 6), WIDTH, MODEL)
    for ours, theirs in zip(loaded, pairs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    narrow = load_projections(path, (3, 1), WIDTH, MODEL)
    assert torch.equal(narrow[0][1], pairs[0][1][:, :3]) and narrow[1][0].shape == (WIDTH, 1)
    # The precision of the model does not matter to the moments of its keys.
    load_projections(path, (8, 6), WIDTH, ModelIdentity(model_type="qwen3", dtype="float32"))


def test_file_of_another_model_or_shape(saved, tmp_path):
    path, _ = saved
    with pytest.raises(ConfigError, match=r"made for layers 2 \(this model: 3\)"):
        load_projections(path, (8, 6), WIDTH, ModelIdentity(layers=3))
    with pytest.raises(ConfigError, match=r"layers.1.key must be floats \[24, at least 8\]"):
        load_projections(path, (8, 8), WIDTH)
    with pytest.raises(ConfigError, match=r"layers.0.key must be floats \[32, at least 8\]"):
        load_projections(path, (8, 6), 32)
    with pytest.raises(ConfigError, match=r"must have layers.2.key"):
        load_projections(path, (8, 6, 6), WIDTH)
    with pytest.raises(ConfigError, match="must be a readable safetensors file"):
        load_projections(tmp_path / "none", (8,), WIDTH)
    (tmp_path / "broken").write_bytes(b"not a tensor in sight")
    with pytest.raises(ConfigError, match="must be a readable safetensors file"):
        load_projections(tmp_path / "broken", (8,), WIDTH)
    save_file({"layers.0.key": torch.zeros(2, 2)}, tmp_path / "foreign")
    with pytest.raises(ConfigError, match="kvswap_projection must be '1', got None"):
        load_projections(tmp_path / "foreign", (1,), 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_file_with_a_number_that_is_none(tmp_path, bad):
    matrix = torch.ones(4, 2)
    matrix[1, 1] = bad
    save_projections(tmp_path / "p", [(torch.ones(4, 2), matrix)], kind="svd_keys")
    with pytest.raises(ConfigError, match=r"layers.0.query must be finite"):
        load_projections(tmp_path / "p", (2,), 4)
    load_projections(tmp_path / "p", (1,), 4)  # the bad column is not used
