"""Layers that differ in how many tokens they keep, against the executable specification."""

from __future__ import annotations

import random

import pytest

from tests.how_long import lives
from tests.python.test_session import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    Twins,
    live,
    native,
    options,
)


def cake(rng: random.Random, path, heads: str):
    return options(
        path,
        rows="none",
        heads=heads,
        keeper="cake",
        keep_tokens=rng.choice([1, 7, 16, 30]),
        keep_window=rng.choice([1, 5, 20]),
        keep_pool=rng.choice([1, 2, 5]),
        keep_variance=rng.choice([0.0, 200.0]),
        keep_preference=rng.choice([(1.0, 1.0), (1.6, 0.4)]),
        keep_layer_most=rng.choice([1.0, 1.5, 3.0, 100.0]),
        group_tokens=rng.choice([1, 3, 4]),
        groups_max=rng.choice([1, 3]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
    )


def check_division(twins: Twins) -> set[int]:
    """No layer has more than the most, nor all together more than the average; who has what."""
    made, session = twins.options, twins.sessions[0]
    kept = [session.counters()[f"tokens_kept_{layer}"] for layer in range(LAYERS)]
    most = int(made.keep_layer_most * (made.keep_tokens + made.keep_window)) - made.keep_window
    assert max(kept) <= max(most, made.keep_tokens)
    assert sum(kept) <= made.keep_tokens * LAYERS
    assert session.counters()["tokens_kept"] == pytest.approx(sum(kept) / LAYERS)
    return set(kept)


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(3, 10)))
def test_random_operations_where_a_prompt_divides_tokens_among_layers(tmp_path, seed, heads):
    rng = random.Random(seed)
    made = cake(rng, tmp_path, heads)
    made.exact_layers = rng.choice([[], [], [1]])
    if heads == "all" and made.group_tokens > 1:
        made.records = rng.choice(["model", "fp8", "int4"])
    check_division(live(made, rng, seed))


@pytest.mark.parametrize("heads", ["all", "each"])
def test_layers_differ_and_use_all_there_is(tmp_path, heads):
    made = options(tmp_path, rows="none", heads=heads, keeper="cake", keep_tokens=16)
    made.keep_window, made.keep_variance = 8, 200.0
    twins = Twins(made, seed=3)
    for tokens in (150, 1, 1, 40, 1):
        twins.forward(2, tokens)
    assert len(check_division(twins)) > 1
    assert twins.sessions[0].counters()["tokens_kept"] == 16
    ledger = twins.sessions[0].ledger()
    alike = options(tmp_path, rows="none", heads=heads, keeper="observed", keep_tokens=16)
    alike.keep_window = 8
    other = Twins(alike)
    other.forward(2, 150)
    page = 2 * made.group_tokens * HEAD_DIM * KV_HEADS * 4
    beside = 2 * LAYERS * (page + 4096)  # a page that is partly empty, and tables
    assert ledger["kept"] <= other.sessions[0].ledger()["kept"] + beside


@pytest.mark.parametrize("seed", range(lives(2, 6)))
def test_random_operations_where_layers_have_shares(tmp_path, seed):
    rng = random.Random(seed)
    made = cake(rng, tmp_path, "all")
    made.keeper, made.keep_variance, made.keep_preference = "observed", 0.0, (1.0, 1.0)
    made.keep_layer_shares = tuple(rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(LAYERS - 1))
    made.keep_layer_shares += (1.0,)
    made.keep_layer_least = rng.choice([0, 1])
    if rng.random() < 0.7:
        made.keep_heads = tuple(
            layer * HEADS + head
            for layer in range(LAYERS)
            for head in sorted(rng.sample(range(HEADS), rng.choice([1, 2])))
        )
    if rng.random() < 0.5:
        made.directory = ""
    check_division(live(made, rng, seed) if made.directory else _dropped(made, seed))


def _dropped(made, seed: int) -> Twins:
    twins = Twins(made, seed)
    for tokens in (150, 1, 1, 40, 1, 1):
        twins.forward(2, tokens)
    return twins


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"keep_layer_shares": (1.0,)},
            "retention.layer_weights must be one number for each layer",
        ),
        ({"keep_layer_shares": (0.0,) * LAYERS}, "one of them above 0"),
        ({"keep_heads": (LAYERS * HEADS,)}, "retention.scoring_heads must be"),
        ({"keep_heads": (0,)}, "must name a head of each layer, got none of layer 1"),
    ],
)
def test_what_layers_have_is_of_the_model(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        native(options(tmp_path, rows="none", keeper="observed", **changes))
