"""Sessions that choose clusters of similar keys, from Python.

The same bits from every reader and any number of threads, equality with the full cache, what is
refused, what `stats()` tells.

What is attended, where each token stands and what faults leave is held token by token by
tests/cpp/engine/test_cluster_updater.cpp; that clusters are the reference's, by
test_engine_clusters.py.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from tests.python.test_session import HEAD_DIM, HEADS, KV_HEADS, native, options
from tests.python.tiny_models import greedy, prompt, tiny_model
from tests.reference import float8_rounded

CLUSTERS = {
    "rows": "centroid",
    "grouping": "clusters",
    "cluster_tokens": 4,
    "cluster_tokens_max": 10,
    "pending_tokens": 5,
}
READERS = [
    {"reader": "sync", "io_mode": "buffered"},
    {"reader": "threads", "io_mode": "direct"},
    {"reader": "uring", "io_mode": "direct"},
    {"reader": "auto", "io_mode": "auto", "device_model": "ufs"},
    {"reader": "auto", "io_mode": "auto", "resident_layers": 2},
    {"reader": "sync", "io_mode": "buffered", "layout": "pools", "pool_slack_pages": 0},
    {"reader": "auto", "io_mode": "auto", "layout": "pools", "merge_gap_bytes": 0},
]


def life(session, seed: int, steps: int = 60) -> list[torch.Tensor]:
    """What a random life of a session answers: prompts, steps, crops, beams, a reset."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    batch, positions, outputs = 2, 0, []
    for _ in range(steps):
        action = rng.random()
        tokens = rng.randint(20, 150) if positions < 100 or action < 0.1 else rng.randint(1, 4)
        if positions >= 100 and action > 0.93:
            positions = rng.randint(positions // 2, positions)
            session.crop(positions)
            continue
        if positions >= 100 and action > 0.86:
            indices = [rng.randrange(batch) for _ in range(rng.randint(1, 3))]
            session.select_sequences(indices)
            batch = len(indices)
            continue
        valid = torch.ones(batch, tokens, dtype=torch.bool)
        if positions == 0:
            valid[1:, : tokens // 3] = False
        session.begin_pass("prefill" if tokens > 4 else "decode", valid)
        for layer in range(2):
            query = draw(batch, HEADS, tokens, HEAD_DIM)
            if rng.random() < 0.5 and positions:
                session.look_ahead(layer, query)
            keys, values = (draw(batch, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
            outputs.append(session.extend(layer, query, keys, values, HEAD_DIM**-0.5))
        positions += tokens
    return outputs


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of the first reader, by (heads, score)."""
    known = {}

    def of(heads: str, score: str) -> list[torch.Tensor]:
        if (heads, score) not in known:
            folder = tmp_path_factory.mktemp("clusters")
            session = native(clustered(folder, heads, score, READERS[0]))
            known[heads, score] = life(session, seed=3)
        return known[heads, score]

    return of


def clustered(folder, heads: str, score: str, reader):
    more = {**CLUSTERS, "heads": heads, "cluster_score": score, **reader}
    return options(folder, group_tokens=8, groups_max=6, pages_max=24, **more)


@pytest.mark.parametrize("reader", READERS[1:], ids=lambda each: "-".join(map(str, each.values())))
@pytest.mark.parametrize(
    ("heads", "score"), [("all", "sum"), ("each", "mass"), ("all", "max_mass")]
)
@pytest.mark.pairs(once=["reader", "heads", "score"])
def test_every_reader_answers_alike_to_the_bit(tmp_path, answers, heads, score, reader):
    session = native(clustered(tmp_path, heads, score, reader))
    for ours, theirs in zip(life(session, seed=3), answers(heads, score), strict=True):
        assert torch.equal(ours, theirs)
    assert session.counters()["cluster_splits"] > 0


@pytest.mark.parametrize("layout", ["sequence", "pools"])
@pytest.mark.parametrize("update", ["static", "local"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.pairs
def test_other_updates_answer_alike_to_the_bit(tmp_path, heads, update, layout):
    """From every reader. Who still waits may depend on the layout: without room all is packed."""
    more = {"cluster_update": update, "layout": layout}
    more["pending_tokens"] = SwapConfig().pending_tokens
    found = []
    for reader in READERS[:4]:
        session = native(clustered(tmp_path, heads, "sum", {**reader, **more}))
        found.append(life(session, seed=3))
        counters = session.counters()
        assert counters["cluster_records_sealed"] > 0 and counters["cluster_splits_forced"] == 0
    for answers in found[1:]:
        assert all(map(torch.equal, answers, found[0]))


def test_threads_change_no_bit(tmp_path, answers):
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            session = native(clustered(tmp_path, "all", "sum", READERS[0]))
            for ours, theirs in zip(life(session, seed=3), answers("all", "sum"), strict=True):
                assert torch.equal(ours, theirs)
        finally:
            torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


def small(**changes):
    base = {"group_tokens": 8, "tail_tokens": 4, "sink_tokens": 2, "select_queries_max": 4}
    return SwapConfig(**CLUSTERS | base | {"replacement": "lru"} | changes)


@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("update", ["adaptive", "static", "local"])
@pytest.mark.pairs
def test_with_room_for_all_tokens_are_the_full_caches(tmp_path, llama, heads, look_ahead, update):
    inputs = prompt(2, 90, padding=(0, 31))
    config = small(heads=heads, groups_max=40, pages_max=40, group_tokens=32, look_ahead=look_ahead)
    pending = SwapConfig().pending_tokens
    config = dataclasses.replace(config, cluster_update=update, pending_tokens=pending)
    expected = greedy(llama, inputs, tokens=40)
    with KVSwapCache(llama, tmp_path, config) as cache:
        assert torch.equal(greedy(llama, inputs, cache, tokens=40), expected)


def test_keys_that_are_no_numbers_have_clusters_of_their_own(tmp_path):
    """What DynamicCache attends to is attended to: a NaN stays visible, and spoils no centroid."""
    session = native(clustered(tmp_path, "all", "sum", READERS[0]))
    keys, values = torch.randn(2, 1, KV_HEADS, 100, HEAD_DIM)
    keys[0, :, 40, 3] = float("nan")
    keys[0, :, 41, 3] = float("inf")
    query = torch.randn(1, HEADS, 100, HEAD_DIM)
    for layer in range(2):
        session.extend(layer, query, keys, values, 0.125)
    one = torch.randn(1, HEADS, 1, HEAD_DIM)
    session.begin_pass("decode")
    for _ in range(30):
        for layer in range(2):
            new = torch.randn(2, 1, KV_HEADS, 1, HEAD_DIM)
            answer = session.extend(layer, one, new[0], new[1], 0.125)
    assert answer.isfinite().all(), "the key without a number is worth nothing, and is not chosen"


def decoded(session, keys, values, steps: int) -> torch.Tensor:
    """What the last of so many steps answers; keys and values: [1, kv_heads, tokens, head_dim]."""
    heads = HEADS // KV_HEADS * keys.shape[1]
    for i in range(steps + 1):
        one = slice(i - 1, i) if i else slice(steps, None)
        query = keys[:, :1, one].expand(-1, heads, -1, -1).contiguous()
        for layer in range(2):
            new = (each[:, :, one].contiguous() for each in (keys, values))
            answer = session.extend(layer, query, *new, keys.shape[-1] ** -0.5)
    return answer


def test_sums_that_float16_cannot_hold(tmp_path):
    """Keys near its largest number: products, centroids and variances are float32 inside."""
    made = clustered(tmp_path, "all", "sum", {**READERS[0], "dtype": torch.float16})
    session = native(made)
    generator = torch.Generator().manual_seed(4)
    keys = torch.full((1, KV_HEADS, 200, HEAD_DIM), 6e4)
    keys *= torch.randint(0, 2, keys.shape, generator=generator) * 2 - 1
    values = torch.randn(keys.shape, generator=generator)
    answer = decoded(session, keys.half(), values.half(), steps=40)
    assert answer.isfinite().all()
    # A key's product with itself is so large that it alone is attended.
    torch.testing.assert_close(answer[0, 0, 0], values.half()[0, 0, 39])


@pytest.mark.parametrize("head_dim", [1, 256])
@pytest.mark.parametrize("layout", ["sequence", "pools"])
def test_heads_of_one_number_and_of_many(tmp_path, head_dim, layout):
    more = {**READERS[0], "head_dim": head_dim, "layout": layout, "group_tokens": 8}
    if head_dim == 1:
        more |= {"group_tokens": 64, "cluster_tokens": 64, "cluster_tokens_max": 128}
    session = native(_with(tmp_path, more))
    generator = torch.Generator().manual_seed(4)
    keys, values = torch.randn(2, 1, KV_HEADS, 800, head_dim, generator=generator)
    answer = decoded(session, keys, values, steps=150)
    assert answer.isfinite().all() and session.counters()["clusters"] > 1


def _with(folder, more):
    return options(folder, **{"groups_max": 6, "pages_max": 24, "heads": "all", **CLUSTERS, **more})


def test_more_room_than_there_are_clusters(tmp_path):
    """Then everything is attended, as by plain attention."""
    session = native(_with(tmp_path, {"groups_max": 500, "pages_max": 500, "group_tokens": 8}))
    generator = torch.Generator().manual_seed(4)
    keys, values = torch.randn(2, 1, KV_HEADS, 100, HEAD_DIM, generator=generator)
    answer = decoded(session, keys, values, steps=30)
    query = keys[:, :1, 29:30].expand(-1, HEADS, -1, -1)
    order = torch.cat([torch.arange(30, 100), torch.arange(30)])
    full = [each[:, :, order].repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *full)
    torch.testing.assert_close(answer.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)


def test_nothing_waits_and_reads_are_forced(tmp_path):
    made = clustered(tmp_path, "all", "sum", READERS[0])
    made.pending_tokens, made.pages_max = 0, 6
    session = native(made)
    life(session, seed=3)
    counters = session.counters()
    assert counters["tokens_waiting"] == 0
    assert counters["cluster_records_read"] > 0 and counters["cluster_splits"] > 0


def test_a_second_text_is_answered_as_by_a_new_session(tmp_path):
    session = native(clustered(tmp_path, "all", "sum", READERS[0]))
    life(session, seed=5)
    before = session.counters()
    session.reset()
    for ours, theirs in zip(
        life(session, seed=3),
        life(native(clustered(tmp_path, "all", "sum", READERS[0])), seed=3),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    after = session.counters()
    for name in ("cluster_splits", "cluster_splits_forced", "cluster_records_sealed"):
        assert after[name] > before[name] > 0, "what has been counted is not forgotten"


def test_counters_of_beams_and_of_a_reset_never_fall(tmp_path):
    session = native(clustered(tmp_path, "all", "sum", READERS[0]))
    life(session, seed=3)
    counted = [session.counters()]
    for change in (
        lambda: session.select_sequences([0, 0, 0]),
        lambda: session.select_sequences([2]),
        session.reset,
    ):
        change()
        counted.append(session.counters())
    for name in ("cluster_splits", "cluster_splits_refused", "cluster_splits_forced"):
        assert len({each[name] for each in counted}) == 1


def test_a_budget_below_what_clusters_take_is_refused_with_the_number(tmp_path, llama):
    config = small(groups_max=5, pages_max=10)
    with pytest.raises(ValueError, match=r"kv_memory_bytes: must be at least \d+"):
        KVSwapCache(llama, tmp_path, config, max_context=4000, kv_memory_bytes="64KiB")


def test_pages_that_are_mostly_padding_are_refused_with_the_numbers(tmp_path):
    """The smallest page is half of what the disk reads at once, as for groups."""
    with pytest.raises(
        ValueError, match=r"at least half of what the disk reads at once \((512|4096)"
    ):
        native(_with(tmp_path, {"group_tokens": 1, "head_dim": 1, "io_mode": "direct"}))


def test_a_cluster_of_too_many_pages_is_refused_in_pools(tmp_path):
    more = {"layout": "pools", "group_tokens": 4, "cluster_tokens_max": 65}
    with pytest.raises(
        ValueError, match=r"at most 16 pages of selection.group_tokens \(64\), got 65"
    ):
        native(_with(tmp_path, more))


@pytest.mark.parametrize("kind", ["equal", "one token", "padding only"])
def test_texts_that_are_nothing_to_cluster(tmp_path, kind):
    session = native(clustered(tmp_path, "all", "sum", READERS[0]))
    tokens = 1 if kind == "one token" else 100
    keys = torch.ones(1, KV_HEADS, tokens, HEAD_DIM)
    valid = torch.full((1, tokens), kind != "padding only")
    session.begin_pass("decode" if kind == "one token" else "prefill", valid)
    for layer in range(2):
        session.extend(layer, torch.ones(1, HEADS, tokens, HEAD_DIM), keys, keys, 0.125)
    session.begin_pass("decode")
    for _ in range(40):
        for layer in range(2):
            key = torch.ones(1, KV_HEADS, 1, HEAD_DIM)
            answer = session.extend(layer, torch.ones(1, HEADS, 1, HEAD_DIM), key, key, 0.125)
            torch.testing.assert_close(answer, torch.ones_like(answer))


@pytest.mark.parametrize("heads", ["all", "each"])
def test_fp8_rounds_each_token_by_itself(tmp_path, heads):
    """So the same bits from every reader, wherever a token stands, however often it is packed."""
    found = []
    for reader in READERS[:5]:
        session = native(clustered(tmp_path, heads, "max", {**reader, "records": "fp8"}))
        found.append(life(session, seed=3))
        assert session.counters()["cluster_splits"] > 0
    for answers in found[1:]:
        assert all(map(torch.equal, answers, found[0]))
    session.reset()
    keys, values = (torch.randn(2, KV_HEADS, 90, HEAD_DIM) for _ in range(2))
    keys[0, 0, 20, 3], values[1, 1, 21, 4] = torch.inf, 1e6  # others of their pages keep theirs
    session.append(0, keys, values)
    sealed = slice(8, 72)  # behind the group of first tokens, before the tail
    for read, given in zip(session.read_back(0, 0, 90), (keys, values), strict=True):
        alone = given[:, :, sealed, None]  # a record of each token
        torch.testing.assert_close(
            read[:, :, sealed], float8_rounded(alone)[..., 0, :], rtol=0, atol=0, equal_nan=True
        )


def test_a_device_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="clusters must be left out where pages are a device's"):
        native(clustered(tmp_path, "all", "sum", {"device": "host"}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"grouping": "clusters"}, "grouping: must be left out where rows is low_rank"),
        ({"rows": "centroid"}, "rows: must be left out where grouping is runs"),
        ({"cluster_tokens": 8}, "cluster_tokens: must be left out where grouping is runs"),
        ({"cluster_score": "mass"}, "cluster_score: must be left out where grouping is runs"),
        (CLUSTERS | {"cluster_tokens_max": 4, "cluster_tokens": 5}, "at least cluster_tokens"),
        (CLUSTERS | {"score": "mass"}, "score: must be left out where"),
        (CLUSTERS | {"rank": 5}, "rank: must be left out where rows is centroid"),
        (
            CLUSTERS | {"records": "int4"},
            "where grouping is clusters, since clusters are packed anew",
        ),
        (CLUSTERS | {"keeper": "observed"}, "keeper: must be left out where grouping is clusters"),
        (CLUSTERS | {"summary_dtype": "int8"}, "summary_dtype: must be left out where rows is cen"),
        (CLUSTERS | {"split_factor": 0.0}, "split_factor: must be a float"),
        (CLUSTERS | {"pending_tokens": -1}, "pending_tokens: must be an int from 0 to 1024"),
        ({"cluster_update": "local"}, "cluster_update: must be left out where grouping is runs"),
        (CLUSTERS | {"cluster_update": "never"}, "must be one of adaptive, static, local"),
        (CLUSTERS | {"cluster_update": "local"}, "pending_tokens: must be left out where cluster_"),
        ({"layout": "pools"}, "layout: must be left out where grouping is runs"),
        (CLUSTERS | {"pool_slack_pages": 3}, "pool_slack_pages: must be left out where layout"),
    ],
)
def test_settings_that_do_not_go_together(settings, told):
    with pytest.raises(ConfigError, match=told):
        SwapConfig(**settings)


def test_stats_tell_of_clusters(tmp_path, llama):
    config = small(groups_max=5, pages_max=10, pending_tokens=2)
    with KVSwapCache(llama, tmp_path, config, max_context=400, kv_memory_bytes="8MiB") as cache:
        greedy(llama, prompt(2, 150), cache, tokens=60)
        stats = cache.stats()
        counters = stats.counters
        assert counters["clusters"] > 10 and 1 < counters["tokens_a_cluster"] <= 10
        assert counters["cluster_splits"] > 0 and counters["tokens_waiting"] <= 2
        assert counters["cluster_records_sealed"] > 0
        assert 1 <= counters["pages_a_cluster"] <= 2
        assert counters["bytes_a_read"] >= counters["record_bytes"]
        assert counters["cluster_splits_refused"] >= 0 and counters["cluster_records_read"] > 0
        assert stats.bytes_written_per_token > 0
        assert "clusters" in str(stats)
        assert stats.resident_bytes <= 8 << 20


def test_audits_say_what_clusters_miss_and_a_limit_takes_more_of_them(tmp_path, llama):
    """The share itself is held by tests/cpp/engine/test_cluster_updater.cpp."""
    made = small(groups_max=4, pages_max=16, audit_every=1, audit_groups=64, missed_mass_max=0.05)
    with KVSwapCache(llama, tmp_path, made) as cache:
        greedy(llama, prompt(1, 300), cache, tokens=30)
        counters = cache.stats().counters
        assert counters["audits"] > 20 and 0 < counters["missed_mass"] < 1
        assert counters["groups_now_0"] > 4


def test_turns_crops_and_beams_with_little_memory(tmp_path, llama):
    """Answers differ from the full cache's; that each call ends well and counts right is held."""
    with KVSwapCache(llama, tmp_path, small(groups_max=4, pages_max=8)) as cache:
        plain = DynamicCache(config=llama.config)
        ids = prompt(2, 70)["input_ids"]
        for turn, question in enumerate((1, 30, 80)):
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            ours = greedy(llama, inputs, cache, tokens=9)
            assert ours.shape == greedy(llama, inputs, plain, tokens=9).shape
            cache.crop(-3)
            plain.crop(-3)
            ids = torch.cat([ours[:, :-2], prompt(2, question, seed=turn)["input_ids"]], 1)
        cache.reset()
        inputs = prompt(2, 60, padding=(9, 0))
        ours = greedy(llama, inputs, cache, num_beams=3, num_return_sequences=2, tokens=8)
        assert len(ours) == 4
