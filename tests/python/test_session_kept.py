"""The C++ session against the executable specification, where tokens are kept."""

from __future__ import annotations

import copy
import itertools
import random
import re

import pytest
import torch

from kvswap_torch import SwapConfig
from kvswap_torch.errors import BudgetError
from tests.how_long import lives
from tests.python.reference_heads import reference
from tests.python.test_session import (
    BACK_ENDS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    OF_GROUPS,
    Twins,
    live,
    native,
    options,
)


@pytest.mark.parametrize("rows", OF_GROUPS)
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(4, 12)))
def test_random_operations_with_kept_tokens(tmp_path, seed, rows, heads):
    rng = random.Random(seed)
    keeper = ["observed", "heavy", "given", "arkv"][seed % 4]
    arkv = {
        "keep_variance": rng.choice([0.0, 263.8]),
        "keep_slack": rng.choice([0.0, 0.75, 1.0]),
        "keep_ratio": rng.choice([None, 0.0, 0.3, 1.0]),
    }
    if arkv["keep_ratio"] != 1.0:
        arkv["keep_count"] = rng.choice(["bytes", "tokens"])
    if arkv["keep_ratio"] is None:
        arkv["keep_temperatures"] = rng.choice([SwapConfig().keep_temperatures, (1.0, 0.5, 2.0)])
    interval = 0 if keeper == "arkv" else rng.choice([0, 3, 8])
    from_disk = (
        rng.choice(["attended", "disk"]) if keeper == "observed" and interval else "attended"
    )
    is_shared = keeper == "observed" and rows != "none" and rng.random() < 0.5
    group_tokens = rng.choice([1, 3, 4, 16])
    least = group_tokens if keeper == "arkv" else 1
    made = options(
        tmp_path,
        rows=rows,
        heads=heads,
        score=rng.choice(["sum", "mass"] if rows == "low_rank" else ["sum"]),
        keeper=keeper,
        keep_tokens=max(least, rng.choice([1, 7, 16, 30])),
        keep_window=32 if keeper == "given" else rng.choice([1, 5, 20]),
        keep_pool=rng.choice([1, 2, 5]) if keeper in ("observed", "arkv") else 5,
        keep_interval=interval,
        keep_scores=from_disk,
        keep_share="auto" if is_shared else "fixed",
        **(arkv if keeper == "arkv" else {}),
        exact_layers=rng.choice([[], [], [1]]),
        group_tokens=group_tokens,
        groups_max=rng.choice([1, 3, 8]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
        **rng.choice(BACK_ENDS),
    )
    if heads == "all" and made.group_tokens >= 3:
        made.records = rng.choice(["model", "fp8", "int4"])
    twins = live(made, rng, seed)
    is_mixed = keeper == "arkv" and made.keep_ratio != 1.0 and made.keep_count == "bytes"
    each = 4 if is_mixed else 1  # in fp32's room
    assert 0 <= twins.sessions[0].counters()["tokens_kept"] <= made.keep_tokens * each


@pytest.mark.parametrize("rows", ["low_rank", "box", "mean"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("seed", range(lives(2, 4)))
def test_random_operations_with_outliers(tmp_path, seed, rows, heads):
    rng = random.Random(seed)
    group_tokens = rng.choice([3, 4, 16])
    made = options(
        tmp_path,
        rows=rows,
        heads=heads,
        keeper="outliers",
        keep_tokens=group_tokens * rng.choice([1, 2, 5]) + rng.choice([0, 1]),
        exact_layers=rng.choice([[], [1]]),
        group_tokens=group_tokens,
        groups_max=rng.choice([1, 3, 8]),
        tail_tokens=rng.choice([0, 3, 32]),
        sink_tokens=rng.choice([0, 4, 6]),
        select_queries_max=rng.choice([1, 4, 8]),
    )
    if heads == "all":
        made.records = rng.choice(["model", "fp8", "int4"])
    twins = live(made, rng, seed)
    assert twins.sessions[0].counters()["tokens_kept"] <= made.keep_tokens


def test_a_group_that_is_unlike_its_mean_stays(tmp_path):
    """Of 35 groups two have a key that points elsewhere; nobody asks for them."""
    made = options(tmp_path, rows="mean", keeper="outliers", keep_tokens=8, sink_tokens=0)
    made.group_tokens, made.groups_max = 4, 3
    session = native(made)
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        keys = 1 + 0.1 * torch.randn(1, KV_HEADS, 150, HEAD_DIM, generator=generator)
        keys[:, :, [21, 90]] *= -1
        values = torch.zeros(1, KV_HEADS, 150, HEAD_DIM)
        values[:, :, 21], values[:, :, 90] = 1, 2
        session.extend(layer, torch.ones(1, HEADS, 150, HEAD_DIM), keys, values, 0.1)
    one = torch.ones(1, KV_HEADS, 1, HEAD_DIM)
    session.begin_pass("decode")
    for layer in range(LAYERS):
        # It asks all alike: of equal groups the first three are chosen.
        output = session.extend(layer, torch.zeros(1, HEADS, 1, HEAD_DIM), one, 0 * one, 0.1)
        (attended,) = (3 / output).unique().round().tolist()
        assert 3 * 4 + 8 + made.tail_tokens <= attended <= 3 * 4 + 8 + made.tail_tokens + 4
    assert session.counters()["tokens_kept"] == 8


@pytest.mark.parametrize("rows", ["box", "none"])
def test_turns_follow_prompts_and_intervals(tmp_path, rows):
    made = options(tmp_path, rows=rows, keeper="observed", keep_tokens=16, keep_window=4)
    made.keep_interval = 6
    twins = Twins(made)
    turns = []
    for tokens in (150, 1, 1, 1, 1, 1, 1, 1, 1, 30, 1):
        twins.forward(2, tokens)
        turns.append(twins.sessions[0].counters()["turns"])
    of_all = 2 * LAYERS  # each sequence and layer
    assert turns == [of_all * n for n in (0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3)]
    assert twins.sessions[0].counters()["tokens_kept"] == 16
    ledger = twins.sessions[0].ledger()
    assert ledger["kept"] >= 2 * LAYERS * 16 * 2 * KV_HEADS * HEAD_DIM * 4
    twins.all("crop", 20)
    assert twins.sessions[0].counters()["tokens_kept"] <= 12
    twins.forward(2, 1)
    twins.all("reset")
    assert twins.sessions[0].counters()["tokens_kept"] == 0


@pytest.mark.parametrize("rows", ["box", "none"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("interval", [3, 8])
@pytest.mark.parametrize("records", ["model", "fp8", "int4"])
@pytest.mark.parametrize("device", ["cpu", "host"])
@pytest.mark.pairs
def test_tokens_are_chosen_by_what_is_on_disk(tmp_path, device, rows, heads, interval, records):
    """Of a window of 5: with an interval of 3 a choice goes by queries of the prompt too."""
    made = options(tmp_path, rows=rows, heads=heads, keeper="observed", keep_tokens=12)
    made.device = device
    made.keep_window, made.keep_interval, made.keep_scores = 5, interval, "disk"
    made.records, made.group_tokens = records, 4 if records == "model" else 16
    twins = Twins(made, seed=2)
    turns, read = [], []
    for tokens in (150, *[1] * 9, 2, 4, 3, 40, 1, 1, *[1] * 9):
        twins.forward(2, tokens)
        counters = twins.sessions[0].counters()
        turns.append(counters["turns"])
        read.append(counters["bytes_read"])
    parts = 2 * LAYERS * (KV_HEADS if heads == "each" else 1)
    decoded = 9 + 2 + 4 + 3
    assert turns[13] > parts * (1 + (decoded - 4) // interval - 2)
    token_bytes = 2 * KV_HEADS * HEAD_DIM * (4 if records == "model" else 1)
    of_part = 120 * token_bytes // (KV_HEADS if heads == "each" else 1)
    assert read[9] - read[1] > 2 * of_part * (turns[9] - turns[1]), "all records are read, twice"
    twins.all("crop", 150)  # in the middle of what is chosen by
    twins.all("select_sequences", [1, 1, 0])
    for tokens in (1, 1, 4, 1, 1, 1, 2, 1, 1):
        twins.forward(3, tokens)
    twins.all("crop", 120)  # all that was decoded
    for tokens in (1, 1, 1, 1, 40, 1):
        twins.forward(3, tokens)


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("interval", [3, 8, 20])
def test_turns_that_read_all_that_is_on_disk_are_spread_over_the_interval(
    tmp_path, heads, interval
):
    """Each layer and row has one in every interval, no step more than its share of them."""
    made = options(tmp_path, rows="none", heads=heads, keeper="observed", keep_tokens=12)
    made.keep_window, made.keep_interval, made.keep_scores = 5, interval, "disk"
    twins = Twins(made)
    parts = 2 * LAYERS * (KV_HEADS if heads == "each" else 1)

    def turns_of(passes: list[int]) -> list[float]:
        told = [twins.sessions[0].counters()["turns"]]
        for tokens in passes:
            twins.forward(2, tokens)
            told.append(twins.sessions[0].counters()["turns"])
        return [after - before for before, after in itertools.pairwise(told)]

    def expect_spread() -> None:
        steps = turns_of([1] * 2 * interval)
        assert max(steps) <= -(-parts // interval)
        for first in range(interval + 1):
            assert sum(steps[first : first + interval]) == parts

    assert turns_of([150, 1]) == [0, parts], "after the prompt all at once"
    expect_spread()
    turns_of([2, 4, 3])  # several queries each: a turn comes late by up to three
    turns_of([1])
    expect_spread()
    assert turns_of([40, 1])[1] == parts, "the next prompt leaves them spread"
    expect_spread()
    twins.all("select_sequences", [1, 0])
    expect_spread()


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("scores", ["attended", "disk"])
@pytest.mark.parametrize(
    ("rows", "device"), [("box", "cpu"), ("box", "host"), ("low_rank", "host")]
)
@pytest.mark.pairs
def test_a_prompt_decides_how_many_tokens_stay(tmp_path, device, rows, heads, scores):
    """Of 12 groups of 4: whole groups, the same for all heads, and so many groups fewer."""
    made = options(tmp_path, rows=rows, heads=heads, keeper="observed", keep_tokens=40)
    made.device = device
    made.keep_share, made.keep_window, made.keep_interval = "auto", 6, 5
    made.keep_scores, made.groups_max = scores, 12
    made.pages_max = 24
    twins = Twins(made, seed=1)
    shares = set()
    for prompt in (130, 90, 60):
        twins.forward(2, prompt)
        for _ in range(12):
            twins.forward(2, 1)
            specified = twins.sessions[1]
            of_heads = getattr(specified, "_of_heads", [specified])
            for layer in range(LAYERS):
                for sequence in range(2):
                    counts = {len(one._layers[layer].kept[sequence].positions) for one in of_heads}
                    assert len(counts) == 1
                    (kept,) = counts
                    shares.add(kept)
                    assert kept % 4 == 0 and kept <= 40
                    for one in of_heads:
                        chosen = one._layers[layer].selection[sequence]
                        assert len(chosen) == 12 - kept // 4
    assert len(shares) > 1, "prompts differ"
    kept = [
        len(kept.positions) for one in of_heads for s in one._layers.values() for kept in s.kept
    ]
    assert twins.sessions[0].counters()["tokens_kept"] == sum(kept) / len(kept)


def test_a_budget_that_cannot_hold_what_is_kept_names_the_least_and_its_parts(tmp_path):
    made = options(tmp_path, rows="box", keeper="observed", keep_tokens=4000)
    made.kv_memory_bytes, made.max_context, made.max_batch = 6 << 20, 5000, 1
    with pytest.raises(
        BudgetError, match=r"must be at least \d+ .*kept \d+.*lower retention.tokens"
    ) as told:
        native(made)
    named = [int(number) for number in re.findall(r"\d+", str(told.value))]
    least, parts = named[0], named[3:-1]
    assert sum(parts) == least and named[-1] == made.kv_memory_bytes
    made.kv_memory_bytes = 2 * least
    native(made).close()


def test_without_a_prompt_a_quarter_stays(tmp_path):
    made = options(tmp_path, rows="box", keeper="observed", keep_tokens=40, groups_max=12)
    made.keep_share, made.keep_interval, made.pages_max = "auto", 5, 24
    twins = Twins(made)
    for _ in range(40):
        twins.forward(1, 4)
    assert twins.sessions[0].counters()["tokens_kept"] == 12


@pytest.mark.parametrize("scores", ["attended", "disk"])
@pytest.mark.parametrize("device", ["cpu", "host"])
def test_capped_scores_and_sinks_count_where_tokens_are_chosen(tmp_path, device, scores):
    """Sinks that leave the heads of one KV head nothing: the other's alone choose."""
    made = options(tmp_path, rows="none", keeper="observed", keep_tokens=6, keep_window=3)
    made.device = device
    made.keep_interval, made.keep_scores, made.keep_pool = 3, scores, 1
    alone = copy.copy(made)
    alone.kv_heads, alone.query_heads, alone.device = 1, HEADS // KV_HEADS, "cpu"
    session, of_second = native(made), reference(alone)
    generator = torch.Generator().manual_seed(4)
    sinks = torch.tensor([80.0, 80.0, -torch.inf, 0.0])
    for tokens in (150, *[1] * 12):
        size = (1, KV_HEADS, tokens, HEAD_DIM)
        keys, values = torch.randn(2, *size, generator=generator)
        query = torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator)
        for each in (session, of_second):
            each.begin_pass("decode" if tokens == 1 else "prefill")
        for layer in range(LAYERS):
            session.append(layer, keys, values)
            output = session.attend(layer, query, 0.6, 5.0, sinks)
            own = keys[:, 1:], values[:, 1:]
            of_second.append(layer, *own)
            expected = of_second.attend(layer, query[:, 2:], 0.6, 5.0, sinks[2:])
            torch.testing.assert_close(output[:, :, 2:], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", ["box", "none"])
@pytest.mark.parametrize("records", ["model", "fp8", "int4"])
def test_what_is_decoded_is_kept_until_there_is_no_room(tmp_path, rows, records):
    """Groups of 4 leave the tail of 8: what the prompt left of the room, then a quarter of it."""
    made = options(tmp_path, rows=rows, keeper="arkv", keep_tokens=150, records=records)
    made.keep_variance, made.group_tokens = 263.8, 4 if records == "model" else 16
    twins = Twins(made, seed=1)
    kept, turns, read = [], [], []
    for tokens in (150, *[1] * 80):
        twins.forward(2, tokens)
        counters = twins.sessions[0].counters()
        kept.append(counters["tokens_kept"])
        turns.append(counters["turns"] / (2 * LAYERS))
        read.append(counters["bytes_read"])
    sealed = 150 - 8 - (150 - 8) % made.group_tokens
    sinks = made.group_tokens
    assert kept[1] == sealed - sinks and turns[1] == 1
    assert max(kept) > 150 - made.group_tokens and max(kept) <= 150
    first = turns.index(2)
    assert kept[first] == int(0.75 * kept[first - 1]) + made.group_tokens
    if rows == "none":
        assert read[-1] == read[1], "nothing is read for what joins"
        assert counters["tokens_dropped"] > 0
    twins.all("select_sequences", [1, 1, 0])
    for tokens in (1, 3, 40, 1, 2):
        twins.forward(3, tokens)


@pytest.mark.parametrize("rows", ["box", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ratio", "count"),
    [(0.0, "bytes"), (0.5, "bytes"), (1.0, "bytes"), (0.0, "tokens"), (0.5, "tokens")],
)
@pytest.mark.parametrize("device", ["cpu", "host"])
@pytest.mark.pairs
def test_who_does_not_stay_in_the_dtype_becomes_e4m3(tmp_path, device, rows, dtype, ratio, count):
    made = options(tmp_path, rows=rows, keeper="arkv", keep_tokens=100, keep_ratio=ratio)
    made.device = device
    made.keep_count = count
    made.keep_variance, made.dtype = 263.8, dtype
    session = native(made)
    generator, kept, float8 = torch.Generator().manual_seed(0), [], []
    for tokens in (150, *[1] * 150):
        session.begin_pass("decode" if tokens == 1 else "prefill")
        for layer in range(LAYERS):
            size = (2, KV_HEADS, tokens, HEAD_DIM)
            keys, values = torch.randn(2, *size, generator=generator).to(dtype)
            query = torch.randn(2, HEADS, tokens, HEAD_DIM, generator=generator).to(dtype)
            session.append(layer, keys, values)
            session.attend(layer, query, 0.125)
        counters = session.counters()
        kept.append(counters["tokens_kept"])
        float8.append(counters.get("tokens_kept_fp8", 0))
        each = dtype.itemsize if count == "bytes" else 1
        room = kept[-1] - float8[-1] + -(-float8[-1] // each)
        assert room <= 100
    assert kept[1] == 100 and float8[1] == 0, "of a prompt all are in the model's dtype"
    first = kept.index(75 + 4)
    assert float8[first] == max(0, 75 - round(100 * ratio))
    assert (float8[-1] == 0) == (ratio == 1.0)
    more = ratio < 1.0 and count == "bytes"
    assert (max(kept[-60:]) > 100) == more, "more in the same room"


def test_a_layer_of_even_attention_has_more_in_e4m3(tmp_path):
    made = options(tmp_path, rows="none", keeper="arkv", keep_tokens=100, keep_ratio=None)
    made.keep_variance = 263.8
    twins = Twins(made)
    for tokens in (150, *[1] * 40):
        twins.forward(2, tokens)
    kept = [state.kept for state in twins.sessions[1]._layers.values()]
    quality = torch.tensor([[one.quality for one in of_layer] for of_layer in kept])
    assert (quality > 0).all() and (quality[0] != quality[1]).all()
    rounded = sum(len(one.rounded) for of_layer in kept for one in of_layer)
    assert rounded == 4 * twins.sessions[0].counters()["tokens_kept_fp8"]
