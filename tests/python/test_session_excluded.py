"""Rows of groups that leave kept tokens out: PRKV, algorithm 1, lines 9 to 14."""

from __future__ import annotations

import random

import pytest
import torch

from kvswap_torch.config import SnapKV, SwapConfig
from kvswap_torch.errors import ConfigError
from tests.how_long import lives
from tests.python.test_session import (
    BACK_ENDS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    Twins,
    live,
    native,
    options,
)


@pytest.mark.parametrize("rows", ["box", "mean"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(2, 6)))
def test_random_operations(tmp_path, seed, rows, heads):
    rng = random.Random(seed)
    interval = rng.choice([0, 3, 8])
    made = options(
        tmp_path,
        rows=rows,
        heads=heads,
        keeper="observed",
        exclude_from_summary=True,
        keep_tokens=rng.choice([1, 7, 16, 30]),
        keep_window=rng.choice([1, 5, 20]),
        keep_interval=interval,
        keep_scores=rng.choice(["attended", "disk"]) if interval else "attended",
        keep_share=rng.choice(["fixed", "auto"]),
        exact_layers=rng.choice([[], [], [1]]),
        group_tokens=rng.choice([1, 3, 4, 16]),
        groups_max=rng.choice([1, 3, 8]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
        **rng.choice(BACK_ENDS),
    )
    if heads == "all" and made.group_tokens >= 3:
        made.records = rng.choice(["model", "fp8", "int4"])
    live(made, rng, seed)


@pytest.mark.parametrize("device", ["cpu", "host"])
@pytest.mark.parametrize("records", ["model", "fp8", "int4"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.pairs
def test_rows_follow_the_kept_tokens_of_each_turn(tmp_path, heads, records, device):
    made = options(tmp_path, rows="box", heads=heads, keeper="observed", keep_tokens=12)
    made.exclude_from_summary, made.keep_window, made.keep_interval = True, 5, 3
    made.records, made.group_tokens, made.device = records, 4 if records == "model" else 16, device
    twins = Twins(made, seed=3)
    for tokens in (150, *[1] * 9, 2, 4, 3, 40, 1, 1, 1, 1):
        twins.forward(2, tokens)
    twins.all("crop", 150)
    twins.all("select_sequences", [1, 1, 0])  # two share their rows until they keep other tokens
    for tokens in (1, 1, 4, 1, 1, 1, 2, 1, 1):
        twins.forward(3, tokens)
    twins.all("crop", 20)
    for tokens in (60, 1, 1, 1, 1):
        twins.forward(3, tokens)


@pytest.mark.parametrize("is_excluded", [False, True])
def test_a_group_is_not_selected_for_a_token_that_is_attended_anyway(tmp_path, is_excluded):
    """One key of group 5 is what is asked for, and kept; one of group 20 comes next."""
    made = options(tmp_path, rows="box", keeper="observed", keep_tokens=1, keep_window=1)
    made.keep_pool, made.exclude_from_summary, made.sink_tokens = 1, is_excluded, 0
    made.group_tokens, made.groups_max, made.exact_layers = 4, 1, []
    session = native(made)
    query = torch.zeros(1, HEADS, 150, HEAD_DIM)
    query[..., 0] = 1
    for layer in range(LAYERS):
        keys = torch.zeros(1, KV_HEADS, 150, HEAD_DIM)
        keys[:, :, 21, 0], keys[:, :, 82, 0] = 9, 5
        values = torch.zeros(1, KV_HEADS, 150, HEAD_DIM)
        session.extend(layer, query, keys, values, 1.0)
    one = torch.zeros(1, KV_HEADS, 1, HEAD_DIM)
    session.begin_pass("decode")
    for layer in range(LAYERS):
        session.extend(layer, query[:, :, :1], one, one, 1.0)
        assert session.last_selection(layer) == [[20 if is_excluded else 5]]
    assert session.counters()["tokens_kept"] == 1


def test_only_rows_of_groups_can_leave_tokens_out():
    with pytest.raises(ConfigError, match="exclude_from_summary: must be left out where summary.k"):
        SwapConfig(retention=SnapKV(exclude_from_summary=True))
    assert SwapConfig.preset("prkv").retention.exclude_from_summary
    assert SwapConfig.preset("prkv-auto").retention.exclude_from_summary
