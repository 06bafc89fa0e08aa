"""What is recorded of choices: those of the best groups, with as many tokens as one asks for."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch.tuning.choices import Recorder
from kvswap_torch.tuning.look_ups import sources
from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.recall import Choice, GroupScores, Steps
from kvswap_torch.tuning.samples import Sample

HEADS, KV_HEADS, HEAD_DIM, TOKENS, FOCUS = 4, 2, 8, 160, 130
WIDTH = KV_HEADS * HEAD_DIM
CHOICE = Choice(group_tokens=4, groups_max=16, sink_tokens=4, tail_tokens=8)


def seen() -> Observed:
    generator = torch.Generator().manual_seed(0)
    query = 3 * torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator)
    keys = torch.randn(1, KV_HEADS, TOKENS, HEAD_DIM, generator=generator)
    return Observed(0, query, None, keys, HEAD_DIM**-0.5)


@pytest.fixture
def recorded() -> tuple[Recorder, Sample, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    # Not so sure of what it scores that groups tie.
    pair = tuple(0.3 * torch.randn(WIDTH, 6, generator=generator) for _ in range(2))
    ids = torch.arange(TOKENS)
    ids[FOCUS:] = ids[20 : 20 + TOKENS - FOCUS].clone()
    recorder, sample = Recorder([pair], CHOICE, (2, 4), (6,), "model"), Sample(ids, FOCUS)
    recorder.begin()
    recorder.add(seen(), sample)
    return recorder, sample, pair


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("tokens", [64, 32, 16, 8])
def test_fewer_tokens_are_those_of_the_best_groups(recorded, group, tokens):
    recorder, sample, pair = recorded
    positions = torch.arange(FOCUS, TOKENS)
    choice = Choice(group, 64 // group, 4, 8)
    steps = Steps(seen(), positions, choice, wanted=sources(sample.ids, positions))
    scores = GroupScores(seen(), seen().query, pair, positions, CHOICE)
    best = scores.at(6, "model", [steps])[0].masked_fill(~steps.choosable, -torch.inf)
    chosen = best.topk(tokens // group, dim=1).indices
    held = (steps.mass.gather(1, chosen).sum(1) + steps.always).mean().item()
    assert recorder.sums[group, tokens][0][6] == pytest.approx(held, abs=1e-5)
    found = recorder.found[group, tokens][0][6][0]
    torch.testing.assert_close(found, steps.looked_up.gather(1, chosen).sum(1))


def test_worth_grows_with_the_tokens_attended(recorded):
    recorder, _, _ = recorded
    values = [recorder.worth(1, tokens)[4][0][6] for tokens in recorder.attended]
    assert values == sorted(values, reverse=True)
    assert recorder.best_worth(1)[4][0] <= 1.0
    assert len(recorder.rows[4][0][0]) == CHOICE.groups_max
