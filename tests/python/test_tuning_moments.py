"""Streaming moments and the projections they give: those of all samples at once, and small."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvswap_torch.projection import flat_tokens, query_aware, sum_over_heads, svd_keys
from kvswap_torch.tuning import moments as moments_module
from kvswap_torch.tuning.look_ups import look_up_mass, sources
from kvswap_torch.tuning.moments import LayerMoments
from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.samples import Sample

HEADS, KV_HEADS, HEAD_DIM, TOKENS, FOCUS = 4, 2, 8, 400, 150
WIDTH = KV_HEADS * HEAD_DIM


def seen(seed: int, tokens: int = TOKENS, turn: torch.Tensor | None = None) -> Observed:
    """Keys around an offset; queries that the layer before predicts but for a turn and noise."""
    generator = torch.Generator().manual_seed(seed)
    falling = 0.8 ** torch.arange(HEAD_DIM)
    query = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator) * falling
    noise = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator) * falling
    keys = torch.randn(1, KV_HEADS, tokens, HEAD_DIM, generator=generator) * falling + 3.0
    predicted = None if turn is None else (query + 0.3 * noise) @ turn
    return Observed(0, query, predicted, keys, HEAD_DIM**-0.5)


def of_focus(focus: int, tokens: int = TOKENS) -> Sample:
    """A text in which 40 tokens that are in focus stand before, too."""
    ids = torch.arange(tokens)
    again = min(40, focus, tokens - focus)
    ids[focus : focus + again] = ids[:again].clone()
    return Sample(ids, focus)


def gather(turn: torch.Tensor | None = None) -> tuple[LayerMoments, list[Observed]]:
    moments, samples = LayerMoments(WIDTH), [seen(seed, turn=turn) for seed in range(3)]
    for sample in samples:
        moments.add(sample, of_focus(FOCUS))
    return moments, samples


def rotation() -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=generator)).Q


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(moments_module, "PIECE_TOKENS", 64)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_moments_are_those_of_all_samples():
    moments, samples = gather(rotation())
    keys = torch.cat([flat_tokens(sample.keys) for sample in samples])
    close(moments.key_mean, keys.mean(0))
    centred = keys - keys.mean(0)
    close(moments.key_moment, centred.T @ centred / len(keys))

    def weighted(left: str, right: str) -> torch.Tensor:
        total = torch.zeros(WIDTH, WIDTH)
        for sample in samples:
            rows, columns = (
                sum_over_heads(getattr(sample, name), KV_HEADS) for name in (left, right)
            )
            total += 0.9 * rows[FOCUS:].T @ columns[FOCUS:] / (TOKENS - FOCUS)
            total += 0.1 * rows[:FOCUS].T @ columns[:FOCUS] / FOCUS
        return total / len(samples)

    close(moments.predicted_moment, weighted("predicted", "predicted"))
    close(moments.cross_moment, weighted("predicted", "query"))
    assert (moments.keys, moments.queries) == (3 * TOKENS, 3 * (TOKENS - FOCUS))


def test_queries_that_look_up_count_most():
    """Each head's queries for itself, by the mass that it looks up with."""
    sample, text = seen(0, turn=rotation()), of_focus(FOCUS)
    sample = dataclasses.replace(sample, query=8 * sample.query)  # sure of what they attend to
    moments = LayerMoments(WIDTH, "mass")
    moments.add(sample, text)
    positions = torch.arange(FOCUS, TOKENS)
    mass = look_up_mass(sample, positions, sources(text.ids, positions))
    weights = 1 + moments_module.LOOK_UPS_WEIGHT * mass
    weights *= 0.9 / weights.mean() / (TOKENS - FOCUS)
    assert weights.max() > 10 * weights.min()

    def weighted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(WIDTH, WIDTH)
        for head in range(HEADS):
            block = slice(head // 2 * HEAD_DIM, (head // 2 + 1) * HEAD_DIM)
            rows, columns = left[0, head], right[0, head]
            of_focus = (rows[FOCUS:] * weights[head, :, None]).T @ columns[FOCUS:]
            total[block, block] += of_focus + 0.1 / FOCUS * rows[:FOCUS].T @ columns[:FOCUS]
        return total

    close(moments.predicted_moment, weighted(sample.predicted, sample.predicted))
    close(moments.cross_moment, weighted(sample.predicted, sample.query))


def test_svd_keys_is_that_of_all_keys():
    moments, samples = gather()
    key, query = moments.pair("svd_keys", 5)
    expected, _ = svd_keys(torch.cat([flat_tokens(sample.keys) for sample in samples]), 5)
    close(key @ key.T, expected @ expected.T)
    assert key is query


def test_exact_predictions_give_the_query_aware_projection(monkeypatch):
    monkeypatch.setattr(moments_module, "READ_SHARE", 0.0)
    monkeypatch.setattr(moments_module, "RIDGE", 1e-6)
    moments, samples = gather()
    keys = torch.cat([flat_tokens(sample.keys) for sample in samples])
    queries = torch.cat([sum_over_heads(sample.query, KV_HEADS)[FOCUS:] for sample in samples])
    ours, theirs = moments.pair("query_aware", 6), query_aware(keys, queries, 6)
    form, expected = (pair[1] @ pair[0].T for pair in (ours, theirs))
    torch.testing.assert_close(form, expected, atol=2e-2, rtol=2e-2)


def test_correction_undoes_what_prediction_always_gets_wrong():
    """A prediction in a turned frame: scores as it stands are noise, corrected ones are not."""
    moments, _ = gather(rotation())
    key, query = moments.pair("query_aware", 10)
    plain = query_aware(*(flat_tokens(seen(0).keys), sum_over_heads(seen(0).query, KV_HEADS)), 10)
    fresh = seen(17, turn=rotation())
    keys = flat_tokens(fresh.keys) - moments.key_mean
    guess, true = (sum_over_heads(q, KV_HEADS) for q in (fresh.predicted, fresh.query))
    target = true @ keys.T

    def error(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        return ((guess @ pair[1]) @ (keys @ pair[0]).T - target).square().mean().item()

    assert error((key, query)) < 0.25 * error(plain)


@pytest.mark.parametrize("kind", ["query_aware", "svd_keys"])
def test_a_prefix_of_the_columns_serves_smaller_ranks(kind):
    moments, _ = gather(rotation())
    large, small = moments.pair(kind, WIDTH), moments.pair(kind, 4)
    close(large[1][:, :4] @ large[0][:, :4].T, small[1] @ small[0].T)


def test_energy_rises_to_one():
    moments, _ = gather()
    energy = moments.energy(moments.pair("query_aware", WIDTH))
    assert len(energy) == WIDTH
    assert energy == sorted(energy)
    assert energy[0] > 1 / WIDTH
    assert energy[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_memory_is_bounded_whatever_the_text(tokens):
    moments = LayerMoments(WIDTH)
    before = moments.nbytes
    moments.add(seen(0, tokens), of_focus(24, tokens))
    assert moments.nbytes == before
    assert LayerMoments(8 * 128).nbytes <= 10e6


def test_few_queries_of_a_wide_layer_are_no_harm():
    moments = LayerMoments(WIDTH)
    moments.add(seen(0, 12), Sample(torch.arange(12), 10))
    for matrix in moments.pair("query_aware", WIDTH):
        assert torch.isfinite(matrix).all()


def test_nothing_seen_is_an_error():
    with pytest.raises(ValueError, match="must have seen keys and queries"):
        LayerMoments(WIDTH).pair("query_aware", 4)


def test_rank_beyond_the_width_is_an_error():
    with pytest.raises(ValueError, match="rank must be 1 to 16, got 17"):
        gather()[0].pair("query_aware", WIDTH + 1)
