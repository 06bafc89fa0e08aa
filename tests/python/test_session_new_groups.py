"""`selection.new_group_ratio`: of groups that the step before did not attend, the best alone."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import SwapConfig
from kvswap_torch.errors import ConfigError
from tests.python.test_session import KV_HEADS, LAYERS, native, options, projection

HEADS, HEAD_DIM = 4, 64
TOKENS, STEPS = 200, 24


class Decoding:
    """A session of random tokens whose queries drift, so that choices change little by little."""

    def __init__(self, directory, **changes):
        sizes = {"groups_max": 12, "pages_max": 20, "score": "mass", "group_tokens": 4}
        self.session = native(options(directory, **(sizes | changes)))
        for layer in range(LAYERS):
            self.session.set_projection(layer, *(0.3 * part for part in projection(layer)))
        self.generator = torch.Generator().manual_seed(3)
        self.query = self.random(1, HEADS, 1, HEAD_DIM)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def forward(self, tokens: int = 1) -> list[torch.Tensor]:
        self.session.begin_pass("prefill" if tokens > 1 else "decode", None)
        self.query = self.query + 0.3 * self.random(*self.query.shape)
        outputs = []
        for layer in range(LAYERS):
            keys, values = (self.random(1, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
            query = self.query.expand(-1, -1, tokens, -1).contiguous() + layer
            if layer > 0 and tokens == 1:
                self.session.look_ahead(layer, query + 0.2)
            outputs.append(self.session.extend(layer, query, keys, values, 0.125))
        return outputs

    def choices(self) -> list[set[int]]:
        return [set(self.session.last_selection(layer)[0]) for layer in range(LAYERS)]


def test_what_was_attended_may_stay_and_few_are_new(tmp_path):
    free, few = Decoding(tmp_path), Decoding(tmp_path, new_group_ratio=0.25)
    for each in (free, few):
        each.forward(TOKENS)
    fewer = 0
    before = None
    for step in range(STEPS):
        for each in (free, few):
            each.forward()
        for layer, (all_best, chosen) in enumerate(zip(free.choices(), few.choices(), strict=True)):
            assert chosen <= all_best and len(all_best) == 12
            if step == 0:
                assert chosen == all_best, "after a chunk all are free"
                continue
            new = chosen - before[layer]
            assert len(new) <= 3, "a quarter of 12"
            assert all_best & before[layer] <= chosen, "what was attended stays while it is good"
            fewer += len(all_best - chosen)
        before = few.choices()
    assert fewer > 0
    loaded = [each.session.counters()["groups_loaded"] for each in (few, free)]
    assert loaded[0] < loaded[1]


@pytest.mark.parametrize("mode", ["off", "trust"])
def test_no_prefetch_changes_an_answer(tmp_path, mode):
    """Of `trust`, that it chooses by the predicted query changes it; by `verify` nothing does."""
    verified = Decoding(tmp_path, new_group_ratio=0.25, look_ahead="verify")
    other = Decoding(tmp_path, new_group_ratio=0.25, look_ahead=mode)
    same = True
    for tokens in (TOKENS, *[1] * STEPS):
        pair = verified.forward(tokens), other.forward(tokens)
        same &= all(torch.equal(one, two) for one, two in zip(*pair, strict=True))
    assert same == (mode == "off")


def test_a_fork_knows_what_was_attended_last(tmp_path):
    one = Decoding(tmp_path, new_group_ratio=0.1)
    for tokens in (TOKENS, *[1] * 8):
        one.forward(tokens)
    two = Decoding(tmp_path, new_group_ratio=0.1)
    two.session = one.session.fork()
    two.generator.set_state(one.generator.get_state())
    two.query = one.query
    for _ in range(8):
        outputs = one.forward(), two.forward()
        assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
        assert one.choices() == two.choices()


def test_after_a_chunk_a_crop_or_a_reorder_all_are_free(tmp_path):
    few, free = Decoding(tmp_path, new_group_ratio=0.01), Decoding(tmp_path)
    for each in (few, free):
        each.forward(TOKENS)
        for _ in range(4):
            each.forward()
    assert [len(chosen) < 12 for chosen in few.choices()] == [True] * LAYERS
    edits = (
        lambda each: each.forward(20),
        lambda each: each.session.crop(TOKENS - 30),
        lambda each: each.session.select_sequences([0]),
    )
    for edit in edits:
        for each in (few, free):
            edit(each)
            each.forward()
        assert few.choices() == free.choices()
        for each in (few, free):
            each.forward()


def test_what_is_refused(tmp_path):
    for summary, extra in (({"kind": "none"}, {"retention": {"policy": "recent_only"}}),
                           ({"kind": "centroid"}, {"clusters": {}})):  # fmt: skip
        with pytest.raises(ConfigError, match="selection.new_group_ratio: must be left out"):
            SwapConfig(summary=summary, selection={"new_group_ratio": 0.5}, **extra)
    with pytest.raises(ConfigError, match="must be a number between 0 and 1, got 1.0"):
        SwapConfig(selection={"new_group_ratio": 1.0})
    with pytest.raises(ValueError, match="new_group_ratio must be left out where a device selects"):
        native(options(tmp_path, new_group_ratio=0.5, device="host"))
