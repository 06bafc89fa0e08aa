"""Look-ups: where the next tokens stand too, who turns there, and what of it is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvswap_torch.tuning.look_ups import attention_views, look_up_mass, shares_found, sources
from kvswap_torch.tuning.observe import Observed

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 8, 80


def seen() -> Observed:
    generator = torch.Generator().manual_seed(0)
    query = 3 * torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator)
    keys = torch.randn(1, KV_HEADS, TOKENS, HEAD_DIM, generator=generator)
    return Observed(0, query, None, keys, HEAD_DIM**-0.5)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("sinks", [None, torch.arange(HEADS) - 1.0], ids=["no sinks", "sinks"])
def test_attention_mass_is_the_softmax_of_what_is_seen(softcap, sinks):
    sample, positions = seen(), torch.tensor([20, 50])
    sample = dataclasses.replace(sample, softcap=softcap, sinks=sinks)
    views = attention_views(sample, positions)
    keys = sample.keys[0].repeat_interleave(HEADS // KV_HEADS, 0)
    assert not views[1].any()
    wanted = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.2
    views = attention_views(sample, positions, wanted)
    for row, sought, want, position in zip(*views, wanted, positions.tolist(), strict=True):
        scores = sample.query[0, :, position, None] @ keys[:, : position + 1].mT * sample.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        beside = 0 if sinks is None else sinks.exp()[:, None]
        weights = weights / (weights.sum(-1) + beside)[..., None]
        torch.testing.assert_close(row[: position + 1], weights.mean(0)[0])
        there = weights[:, 0] * want[: position + 1]
        expected = there[there.sum(1) > 0.1].sum(0)
        torch.testing.assert_close(sought[: position + 1], expected)
        assert not row[position + 1 :].any()


def test_sources_are_where_the_next_tokens_stand_too():
    ids = torch.arange(100, 100 + TOKENS)
    ids[70:72] = ids[30:32]
    found = sources(ids, torch.tensor([69, 50, TOKENS - 1]))
    assert found[0].nonzero().flatten().tolist() == list(range(24, 32))
    assert not found[1:].any()


def test_mass_of_look_ups_is_that_of_each_head():
    positions = torch.tensor([30, 60, 70])
    wanted = torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.2
    mass = look_up_mass(seen(), positions, wanted)
    _, together = attention_views(seen(), positions, wanted)
    assert mass.shape == (HEADS, 3)
    torch.testing.assert_close(mass.sum(0), together.sum(1))
    assert ((mass == 0) | (mass > 0.1)).all()
    assert (mass == 0).any()
    assert (mass > 0.1).any()


def test_every_step_that_seeks_counts_as_much():
    """Two layers, two samples; one of five steps seeks nothing."""
    generator = torch.Generator().manual_seed(4)
    sought = [[torch.rand(n, generator=generator) for n in (2, 3)] for _ in range(2)]
    for layer in sought:
        layer[1][0] = 0.0
    found = [
        {rank: [rank / 10 * torch.rand(len(s), generator=generator) * s for s in layer]
         for rank in (4, 8)}
        for layer in sought
    ]  # fmt: skip
    shares = shares_found(found, sought)
    for layer in range(2):
        for rank in (4, 8):
            each = [
                float(found[layer][rank][sample][step])
                / float(sought[0][sample][step] + sought[1][sample][step])
                for sample, step in ((0, 0), (0, 1), (1, 1), (1, 2))
            ]
            assert shares[layer][rank] == pytest.approx(sum(each) / 4)
    whole = shares_found([{0: layer} for layer in sought], sought)
    assert sum(layer[0] for layer in whole) == pytest.approx(1.0)


def test_nothing_sought_has_no_shares():
    assert shares_found([{4: []}], [[]]) == []
    assert shares_found([{4: [torch.zeros(3)]}], [[torch.zeros(3)]]) == []
