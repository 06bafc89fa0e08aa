"""Recorded choices: scaled to other shapes, followed by a cache, and recorded from a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.recorded import GROUP_TOKENS, TAIL_TOKENS, Recorded, record
from bench.side_by_side.plan import CHOICES
from kvswap_torch import KVSwapCache, SwapConfig
from tests.python.tiny_models import has_native, tiny_model, tokens_of

LAYERS, STEPS, WANTED, CANDIDATES = 5, 7, 12, 60
needs_native = pytest.mark.skipif(not has_native(), reason="needs the compiled library")


def drawn(seed: int) -> Recorded:
    """Choices that overlap from step to step, and predictions that hit some of them."""
    draw = np.random.default_rng(seed)

    def rows() -> np.ndarray:
        layers = [
            np.stack([np.sort(draw.choice(CANDIDATES, WANTED, False)) for _ in range(STEPS)])
            for _ in range(LAYERS)
        ]
        return np.stack(layers).astype(np.int32)

    return Recorded(rows(), rows(), CANDIDATES)


def overlap(one: np.ndarray, other: np.ndarray) -> int:
    return len(np.intersect1d(one, other))


@pytest.mark.parametrize("layers", [1, 2, 5, 9])
@pytest.mark.parametrize(
    ("groups", "wanted"), [(60, 12), (200, 12), (200, 5), (500, 36), (500, 30)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_scaled_choices_are_rising_groups_of_the_other_shape(layers, groups, wanted, seed):
    scaled = drawn(seed).scaled(layers, groups, wanted, seed + 1)
    assert scaled.candidates == groups and scaled.steps == STEPS
    for each in (scaled.chosen, scaled.predicted):
        assert each.shape == (layers, STEPS, wanted) and each.dtype == np.int32
        assert each.min() >= 0 and each.max() < groups
        assert (np.diff(each, axis=-1) > 0).all(), "rising, none twice"


@pytest.mark.parametrize("groups", [60, 61, 300])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_what_is_selected_again_or_predicted_stays_so(groups, copies):
    """Scaling renames groups: each has `copies` places, always the same and no other's."""
    plain = drawn(3)
    if groups < CANDIDATES * copies:
        with pytest.raises(ValueError, match=f"at least {CANDIDATES * copies} groups for"):
            plain.scaled(LAYERS, groups, WANTED * copies)
        return
    scaled = plain.scaled(LAYERS, groups, WANTED * copies)
    for layer in range(LAYERS):
        for step in range(1, STEPS):
            now, before = (plain.chosen[layer, at] for at in (step, step - 1))
            mine, earlier = (scaled.chosen[layer, at] for at in (step, step - 1))
            assert overlap(mine, earlier) == copies * overlap(now, before)
            ahead = overlap(mine, scaled.predicted[layer, step])
            assert ahead == copies * overlap(now, plain.predicted[layer, step])
    assert scaled.hit_share() == pytest.approx(plain.hit_share())


@pytest.mark.parametrize("seed", range(4))
def test_of_fewer_groups_the_same_ones_are_left_out_in_every_step(seed):
    """So a choice that stays the same does; the order of leaving out is one for all steps."""
    plain = drawn(seed)
    plain.chosen[:, 1::2] = plain.chosen[:, ::2][:, : STEPS // 2]
    scaled = plain.scaled(LAYERS, 90, 5)
    whole = plain.scaled(LAYERS, 90, WANTED)
    for few, all_of_them in zip(scaled.chosen, whole.chosen, strict=True):
        for step in range(STEPS):
            assert np.isin(few[step], all_of_them[step]).all()
        np.testing.assert_array_equal(few[1::2], few[::2][: STEPS // 2])
    early = (scaled.chosen <= whole.chosen[..., WANTED // 2 - 1 : WANTED // 2]).mean()
    assert 0.2 < early < 0.8, "left out of the whole text, not of one end"


def test_layers_are_taken_evenly_with_the_first_and_the_last():
    plain = drawn(5)
    fewer, more = plain.scaled(3, CANDIDATES, WANTED), plain.scaled(9, CANDIDATES, WANTED)
    every = plain.scaled(LAYERS, CANDIDATES, WANTED)
    np.testing.assert_array_equal(fewer.chosen, every.chosen[[0, 2, 4]])
    np.testing.assert_array_equal(more.predicted, every.predicted[[0, 0, 1, 2, 2, 2, 3, 4, 4]])


def test_the_same_seed_scales_alike_and_another_one_otherwise():
    one, two, other = (drawn(0).scaled(2, 400, WANTED, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.chosen, two.chosen)
    assert (one.chosen != other.chosen).any()


def test_what_was_saved_is_loaded(tmp_path):
    plain = drawn(2)
    plain.save("mine", tmp_path / "new")
    loaded = Recorded.load("mine", tmp_path / "new")
    np.testing.assert_array_equal(loaded.chosen, plain.chosen)
    np.testing.assert_array_equal(loaded.predicted, plain.predicted)
    assert loaded.candidates == CANDIDATES


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "random"])
def test_the_recordings_of_this_repository_are_whole(name):
    recorded = Recorded.load(name)
    assert recorded.chosen.shape == recorded.predicted.shape
    assert recorded.chosen.dtype == recorded.predicted.dtype == np.int32
    for each in (recorded.chosen, recorded.predicted):
        assert each.min() >= 0 and (np.diff(each, axis=-1) > 0).all()
        assert each.max() < recorded.candidates + recorded.steps, "a sealed group by then"
    assert 0.5 < recorded.hit_share() <= 1, "a text is not read at random"


class Listener:
    """A session that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, Any, Any]] = []

    def override_selection(self, layer: int, own: Any, ahead: Any) -> None:
        self.given.append((layer, own, ahead))


def test_each_sequence_is_three_steps_ahead_of_the_last_and_steps_begin_again():
    recorded, session = drawn(1), Listener()
    follow = recorded.follow(session, batch=3)
    for step in (0, 5, STEPS + 2):
        session.given.clear()
        follow(step)
        assert [layer for layer, _, _ in session.given] == list(range(LAYERS))
        for layer, own, ahead in session.given:
            at = [(step + 3 * sequence) % STEPS for sequence in range(3)]
            assert own == [recorded.chosen[layer, each].tolist() for each in at]
            assert ahead == [recorded.predicted[layer, each].tolist() for each in at]


@needs_native
def test_a_cache_that_follows_reads_what_was_recorded(tmp_path):
    """Again the same groups: all are in memory. Others: all are read."""
    model, ids = tiny_model("llama"), tokens_of(1, 400)[0]
    layers, wanted = model.config.num_hidden_layers, 8
    still = np.tile(np.arange(1, wanted + 1, dtype=np.int32), (layers, 4, 1))
    moving = np.stack([still[:, step] + 10 * step for step in range(4)], axis=1)
    loaded = {}
    for name, chosen in (("still", still), ("moving", moving)):
        config = SwapConfig(groups_max=wanted, pages_max=wanted, rank=4, look_ahead="off")
        with (
            KVSwapCache(model, tmp_path, config, max_context=500, max_batch=1) as cache,
            torch.inference_mode(),
        ):
            model(input_ids=ids[None], past_key_values=cache)
            follow = Recorded(chosen, chosen, 90).follow(cache.driver.session, 1)
            counts = []
            for step in range(4):
                follow(step)
                model(input_ids=ids[None, step : step + 1], past_key_values=cache)
                counts.append(cache.stats().counters["groups_loaded"])
        loaded[name] = np.diff(counts).tolist()
    assert loaded["still"] == [0, 0, 0]
    assert loaded["moving"] == [layers * wanted] * 3


@needs_native
def test_a_recording_is_of_the_groups_with_most_attention():
    """By the model's own attention, of the tokens that are neither sinks nor newest."""
    model = tiny_model("llama").float()
    model.set_attn_implementation("eager")
    ids, steps, groups = tokens_of(1, 160), 5, 6
    recorded = record(model, ids, steps, groups)
    with torch.inference_mode():
        attentions = model(ids, output_attentions=True).attentions
    assert recorded.chosen.shape == (len(attentions), steps, groups)
    assert recorded.candidates == (160 - steps - TAIL_TOKENS) // GROUP_TOKENS
    for layer, weights in enumerate(attentions):
        for number, position in enumerate(range(160 - steps, 160)):
            end = (position - TAIL_TOKENS) // GROUP_TOKENS * GROUP_TOKENS
            seen = weights[0, :, position, GROUP_TOKENS:end]
            mass = (seen / seen.sum(-1, keepdim=True)).sum(0).unflatten(0, (-1, GROUP_TOKENS))
            best = 1 + mass.sum(-1).topk(groups).indices.sort().values
            assert recorded.chosen[layer, number].tolist() == best.tolist()
    assert (np.diff(recorded.predicted, axis=-1) > 0).all() and recorded.predicted.min() >= 1
    assert (recorded.predicted[1:] != recorded.chosen[1:]).any(), "of another layer's state"
