"""Projections that are estimated from keys of any size, or cannot be."""

from __future__ import annotations

import pytest
import torch

from kvswap_torch import KVSwapCache, SwapConfig, UnsupportedModelError
from tests.python.tiny_models import SMALL, forward, prompt, tiny_model

SELECTING = SwapConfig(groups_max=3, pages_max=12, **SMALL)


@pytest.mark.parametrize("kind", ["query_aware", "svd_keys", "pca_per_head"])
@pytest.mark.parametrize("size", [1e19, 1e30])
def test_keys_whose_squares_overflow_are_estimated_from(tmp_path, kind, size):
    """As with keys of a usual size, where queries are as small as keys are large."""
    config = SwapConfig(groups_max=3, pages_max=12, projection_kind=kind, **SMALL)
    model, scaled = (tiny_model("llama", head_dim=16) for _ in range(2))
    attention = scaled.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight *= size
        attention.q_proj.weight /= size
    told = []
    for each in (model, scaled):
        with KVSwapCache(each, tmp_path, config=config) as cache:
            ids = prompt(1, 60)["input_ids"]
            forward(each, ids, cache)
            told.append(forward(each, ids[:, :1], cache))
            assert torch.isfinite(cache.driver.session.read_back(0, 0, 60)[0]).all()
    torch.testing.assert_close(told[1], told[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "what"), [("k_proj", "keys"), ("q_proj", "queries")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_that_are_not_finite_name_their_layer(tmp_path, name, what, value):
    model = tiny_model("llama")
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, name).weight[0, 0] = value
    ids = prompt(1, 60)["input_ids"]
    with (
        KVSwapCache(model, tmp_path, config=SELECTING) as cache,
        pytest.raises(
            UnsupportedModelError,
            match=rf"projection of layer 1 .* {what} must be finite, got .*summary.kind mean",
        ),
    ):
        forward(model, ids, cache)
    # The way out that it names.
    settings = {name: value for name, value in SMALL.items() if name != "rank"} | {
        "look_ahead": False
    }
    with KVSwapCache(
        model, tmp_path, config=SwapConfig(rows="mean", groups_max=3, pages_max=12, **settings)
    ) as cache:
        forward(model, ids, cache)
