"""What adaptation takes of a step is of whole stretches, and of a cache that has clusters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.adaptation import drawn, measured, shares
from bench.clustering import kinds
from bench.shapes import SHAPES, make_model


def test_shares_are_of_stretches_in_which_a_group_leaves_the_tail():
    times = [(1.0, 0.0), (1.0, 0.5), (3.0, 0.0), (1.0, 1.0), (9.0, 9.0)]
    assert shares(times, 2) == [0.25, 0.25]


def test_keys_are_drawn_from_the_window_with_noise():
    window = (torch.arange(12.0).view(2, 3, 2), -torch.arange(12.0).view(2, 3, 2))
    ((keys, values),) = drawn(window, batch=4, context=50, seed=1)
    assert keys.shape == values.shape == (4, 2, 50, 2)
    from_window = (values[..., None, :] == window[1][None, :, None]).all(-1)
    assert from_window.any(-1).all()
    far = (keys + values).std() / window[0].std()
    assert far == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("heads", ["all", "each"])
def test_a_filled_cache_adapts(tmp_path, heads):
    shape = dataclasses.replace(SHAPES["tiny"], layers=2)
    config = dict(kinds(8, heads))["clusters, 16 wait"]
    config = dataclasses.replace(config, groups_max=10, pages_max=20)
    network = make_model(shape, 700)
    size = {"batch": 2, "context": 600, "steps": 32}
    told = measured(network, shape, config, **size, path=tmp_path)
    assert 0 < told["share"] < 1
    assert told["clusters"] > 30
    assert told["cluster_splits"] > 0
