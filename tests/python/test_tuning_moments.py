"""Streaming moments: equal to those of all samples at once, and small."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch.projection import flat_tokens, query_aware, sum_over_heads, svd_keys
from tuning import moments as moments_module
from tuning.moments import LayerMoments
from tuning.observe import Observed

HEADS, KV_HEADS, HEAD_DIM, TOKENS, FOCUS = 4, 2, 8, 90, 50
WIDTH = KV_HEADS * HEAD_DIM


def seen(seed: int, tokens: int = TOKENS) -> Observed:
    generator = torch.Generator().manual_seed(seed)
    falling = 0.8 ** torch.arange(HEAD_DIM)
    query = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator) * falling
    keys = torch.randn(1, KV_HEADS, tokens, HEAD_DIM, generator=generator) * falling + 3.0
    return Observed(0, query, None, keys, HEAD_DIM**-0.5)


@pytest.fixture
def gathered(monkeypatch) -> tuple[LayerMoments, torch.Tensor, list[torch.Tensor]]:
    """Moments of three samples, all keys, and each sample's queries."""
    monkeypatch.setattr(moments_module, "PIECE_TOKENS", 16)
    moments, samples = LayerMoments(WIDTH), [seen(seed) for seed in range(3)]
    for sample in samples:
        moments.add(sample, FOCUS)
    keys = torch.cat([flat_tokens(sample.keys) for sample in samples])
    return moments, keys, [sum_over_heads(sample.query, KV_HEADS) for sample in samples]


def test_moments_are_those_of_all_samples(gathered):
    moments, keys, queries = gathered
    torch.testing.assert_close(moments.key_mean, keys.mean(0))
    centred = keys - keys.mean(0)
    expected = centred.T @ centred / len(keys)
    torch.testing.assert_close(moments.key_moment, expected, atol=1e-4, rtol=1e-4)
    focused = torch.cat([q[FOCUS:] for q in queries])
    read = torch.cat([q[:FOCUS] for q in queries])
    expected = 0.9 * focused.T @ focused / len(focused) + 0.1 * read.T @ read / len(read)
    torch.testing.assert_close(moments.query_moment, expected, atol=1e-4, rtol=1e-4)
    assert (moments.keys, moments.queries) == (3 * TOKENS, 3 * (TOKENS - FOCUS))


def test_pairs_are_those_of_the_samples(gathered, monkeypatch):
    moments, keys, queries = gathered
    key, query = moments.pair("svd_keys", 5)
    expected, _ = svd_keys(keys, 5)
    torch.testing.assert_close(key @ key.T, expected @ expected.T, atol=1e-3, rtol=1e-3)
    assert key is query

    monkeypatch.setattr(moments_module, "READ_SHARE", 0.0)
    only = LayerMoments(WIDTH)
    for seed in range(3):
        only.add(seen(seed), FOCUS)
    ours, theirs = only.pair("query_aware", 5), query_aware(
        keys, torch.cat([q[FOCUS:] for q in queries]), 5
    )  # fmt: skip
    form, expected = (pair[1] @ pair[0].T for pair in (ours, theirs))
    torch.testing.assert_close(form, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["query_aware", "svd_keys"])
def test_a_prefix_of_the_columns_serves_smaller_ranks(gathered, kind):
    moments = gathered[0]
    large, small = moments.pair(kind, WIDTH), moments.pair(kind, 4)
    form, expected = large[1][:, :4] @ large[0][:, :4].T, small[1] @ small[0].T
    torch.testing.assert_close(form, expected, atol=1e-3, rtol=1e-3)


def test_energy_rises_to_one_and_is_what_the_scores_keep(gathered):
    moments, keys, queries = gathered
    pair = moments.pair("query_aware", WIDTH)
    energy = moments.energy(pair)
    assert len(energy) == WIDTH
    assert energy == sorted(energy)
    assert energy[-1] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_memory_is_bounded_whatever_the_text(tokens):
    moments = LayerMoments(WIDTH)
    before = moments.nbytes
    moments.add(seen(0, tokens), 32)
    assert moments.nbytes == before
    assert LayerMoments(8 * 128).nbytes <= 10e6


def test_nothing_seen_is_an_error():
    with pytest.raises(ValueError, match="must have seen keys and queries"):
        LayerMoments(WIDTH).pair("query_aware", 4)
