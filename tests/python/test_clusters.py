"""Clusters of similar keys (DynaKV): every token in one place, at any time and for any keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.python.engine_clusters import EngineClusters
from tests.python.reference_methods.cluster_choice import SCORES, best_within, cluster_scores
from tests.python.reference_methods.clusters import (
    PENDING,
    SINK,
    TAIL,
    UPDATES,
    ClusterOptions,
    Clusters,
)
from tests.python.reference_methods.k_means import (
    comparable,
    k_means,
    mean_variance,
    nearest,
    split_in_two,
    squares,
)

STEPS = 40  # after the prompt
OPTIONS = st.builds(
    lambda tokens, factor, pending, sinks, spare, update: ClusterOptions(
        tokens, tokens + spare, factor, pending, sinks, update=update
    ),
    st.integers(1, 12),
    st.sampled_from([0.2, 1.25, 4.0]),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 12),
    st.sampled_from(UPDATES),
)
KINDS = st.sampled_from(["normal", "equal", "few", "moving", "odd"])

ROWS = {"reference": Clusters, "engine": EngineClusters}
Row = Clusters | EngineClusters

pytestmark = pytest.mark.usefixtures("one_thread_throughout")
both = pytest.mark.parametrize("made", ROWS.values(), ids=ROWS)


def drawn(kind: str, tokens: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, width, generator=generator)
    if kind == "equal":
        return keys[:1].expand(tokens, width).contiguous()
    if kind == "few":
        return keys[torch.randint(min(3, tokens), (tokens,), generator=generator)]
    if kind == "moving":
        return keys + torch.arange(tokens)[:, None] / 10
    if kind == "odd":
        which = torch.rand(tokens, generator=generator)
        keys[which < 0.1] = torch.nan
        keys[which > 0.9] = torch.inf
        keys[(which > 0.4) & (which < 0.5)] *= 3e38
    return keys


def check(row: Row, keys: torch.Tensor, left: int) -> None:
    """What must hold after every call."""
    options, place = row.options, row.place
    sinks = min(options.sink_tokens, len(keys))
    assert row.left == max(left, sinks)
    assert (place[:sinks] == SINK).all() and (place[row.left :] == TAIL).all()
    inside = place[sinks : row.left]
    assert ((inside >= 0) | (inside == PENDING)).all() and (inside < row.count).all()
    assert int((inside == PENDING).sum()) == row.pending
    assert row.pending < max(1, options.waiting_max)
    assert row.count <= row.clusters_max
    counts = torch.bincount(inside[inside >= 0], minlength=row.count)
    assert torch.equal(counts, row.size[: row.count])
    assert (counts > 0).all() and (counts <= options.cluster_tokens_max).all()
    for cluster in range(row.count if options.update != "static" else 0):
        mean, variance = mean_variance(keys[row.members(cluster)])
        size = max(1.0, float(squares(mean)), float(variance))
        assert float(squares(row.centroid[cluster] - mean)) <= 1e-6 * size
        assert abs(float(row.variance[cluster] - variance)) <= 1e-3 * size
    assert row.centroid.isfinite().all() and row.variance.isfinite().all()


@both
@given(
    kind=KINDS,
    prompt=st.integers(0, 700),
    width=st.sampled_from([1, 2, 16]),
    options=OPTIONS,
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_every_token_is_in_exactly_one_place(made, kind, prompt, width, options, seed):
    """Sinks, one cluster, pending or tail; sizes, means and bounds hold, whatever is read."""
    keys = drawn(kind, prompt + STEPS, width, seed)
    row = made(width, len(keys), options)
    row.enter_prompt(keys, prompt)
    check(row, keys, prompt)
    generator = torch.Generator().manual_seed(seed)
    for end in range(prompt + 1, prompt + STEPS + 1, 3):
        some = torch.rand(row.count, generator=generator) < 0.2
        row.enter(keys, end, set(some.nonzero().flatten().tolist()))
        check(row, keys, end)


@given(tokens=st.integers(1, 400), seed=st.integers(0, 2**16), kind=KINDS)
@settings(max_examples=40, deadline=None)
def test_k_means_leaves_no_cluster_empty(tokens, seed, kind):
    keys = drawn(kind, tokens, 4, seed)
    keys = keys[comparable(keys)]
    if len(keys) == 0:
        return
    count = min(len(keys), 1 + tokens // 10)
    label = k_means(keys, count)
    found = torch.bincount(label)
    assert len(label) == len(keys) and (found > 0).all() and len(found) <= count
    if kind == "normal":
        assert len(found) == count
    if kind == "equal":
        assert len(found) == 1


@given(tokens=st.integers(2, 60), seed=st.integers(0, 2**16), kind=KINDS)
@settings(max_examples=40, deadline=None)
def test_no_half_of_a_split_is_empty(tokens, seed, kind):
    keys = drawn(kind, tokens, 3, seed)
    keys = keys[comparable(keys)]
    if len(keys) < 2:
        return
    is_second = split_in_two(keys)
    assert 0 < int(is_second.sum()) < len(keys)
    halves = [keys[is_second], keys[~is_second]]
    apart = sum(float(mean_variance(half)[1]) * len(half) for half in halves)
    assert apart <= float(mean_variance(keys)[1]) * len(keys) * (1 + 1e-4) + 1e-4


def test_k_means_finds_what_is_apart():
    """Four heaps far from each other, in turn: each is a cluster."""
    heap = torch.arange(400) % 4
    keys = torch.randn(400, 8, generator=torch.Generator().manual_seed(1)) + 40 * heap[:, None]
    label = k_means(keys, 8)
    for cluster in range(int(label.max()) + 1):
        assert len(heap[label == cluster].unique()) == 1


def test_ties_go_to_the_lower_number():
    centroids = torch.tensor([[1.0], [-1.0], [1.0]])
    assert nearest(torch.tensor([[0.0], [1.0]]), centroids).tolist() == [0, 0]
    assert split_in_two(torch.tensor([[0.0], [1.0], [2.0]])).tolist() == [False, False, True]


@both
def test_equal_keys_fill_clusters_up_and_do_not_split_without_end(made):
    keys = torch.ones(1000, 4)
    row = made(4, 1000, ClusterOptions(16, 32))
    row.enter_prompt(keys, 600)
    before = row.splits
    assert row.threshold == 0.0 and float(row.variance.max()) == 0.0
    for end in range(601, 1001):
        row.enter(keys, end, range(row.count))
    check(row, keys, 1000)
    assert row.splits - before <= 400 // 16 and row.refused == 0
    assert row.count <= math.ceil(1000 / 16)


@both
def test_one_token_is_a_cluster(made):
    row = made(1, 1, ClusterOptions())
    row.enter_prompt(torch.tensor([[3.0]]), 1)
    assert (row.count, row.place.tolist(), row.centroid[0].tolist()) == (1, [0], [3.0])


@both
def test_a_key_that_is_no_number_has_a_cluster_of_its_own(made):
    keys = torch.randn(600, 4, generator=torch.Generator().manual_seed(3))
    keys[300] = torch.nan
    row = made(4, 700, ClusterOptions())
    row.enter_prompt(keys, 600)
    own = int(row.place[300])
    assert row.members(own).tolist() == [300]
    assert row.centroid[own].tolist() == [0.0] * 4
    keys = torch.cat([keys, torch.zeros(1, 4), torch.full((1, 4), -torch.inf)])
    row.enter(keys, 602, range(row.count))
    assert row.members(own).tolist() == [300]  # zero is nearest to that centroid, and stays away
    assert row.members(int(row.place[601])).tolist() == [601]


@both
def test_a_key_that_is_no_number_does_not_count_for_a_centroid(made):
    """At the limit it joins another cluster, which later grows on."""
    keys = torch.tensor([[0.0], [2.0], [torch.nan], [torch.nan], [4.0]])
    row = made(1, 5, ClusterOptions(4, 6))
    row.enter(keys, 5, ())
    assert row.count == row.clusters_max == 2
    assert row.place.tolist() == [0, 0, 1, 0, 0]
    assert (row.centroid.flatten().tolist(), int(row.size[0])) == ([2.0, 0.0], 4)
    check(row, keys, 5)


def wide_row(made: type[Row], pending: int) -> tuple[Row, torch.Tensor]:
    """Two heaps of 300 keys, then keys far from both."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(640, 4, generator=generator)
    keys[300:] += 50
    keys[600:] += 50 + 20 * torch.arange(40)[:, None]
    row = made(4, 640, ClusterOptions(20, 40, 1.25, pending))
    row.enter_prompt(keys, 600)
    return row, keys


@both
def test_a_token_that_makes_its_cluster_too_wide_waits_until_it_is_read(made):
    row, keys = wide_row(made, pending=16)
    nearest_to = int(squares(row.centroid[: row.count] - keys[600]).argmin())
    before, splits = row.members(nearest_to).tolist(), row.splits
    assert row.enter(keys, 601, ()) == []
    assert int(row.place[600]) == PENDING and row.splits == splits
    assert row.members(nearest_to).tolist() == before
    assert row.enter(keys, 602, {nearest_to}) == []
    assert row.pending == 0 and row.splits > splits
    assert (row.place[600:602] >= 0).all()


@both
def test_what_is_read_is_split_at_once(made):
    row, keys = wide_row(made, pending=16)
    count = row.count
    row.enter(keys, 601, range(row.count))
    assert row.count == count + 1 and row.pending == 0
    assert row.members(int(row.place[600])).tolist() == [600]  # far from all that was there


@both
def test_when_enough_wait_the_cluster_that_most_wait_for_is_read(made):
    row, keys = wide_row(made, pending=4)
    forced = [row.enter(keys, end, ()) for end in range(601, 605)]
    assert forced[:3] == [[]] * 3 and len(forced[3]) == 1
    assert row.forced == 1 and row.pending == 0


@both
def test_without_room_to_wait_each_token_has_its_cluster_read(made):
    row, keys = wide_row(made, pending=0)
    assert all(len(row.enter(keys, end, ())) == 1 for end in range(601, 604))


@both
def test_at_the_limit_nothing_splits_and_tokens_join_where_room_is(made):
    keys = torch.randn(1024, 4, generator=torch.Generator().manual_seed(7))
    row = made(4, 1024, ClusterOptions(32, 40, 0.05))  # all are too wide
    row.enter_prompt(keys, 900)
    assert row.count == math.ceil(1.25 * 900 / 32)
    for end in range(901, 1025):
        row.enter(keys, end, range(row.count))
        check(row, keys, end)
    assert row.count == row.clusters_max == 40 and row.refused > 0


@both
def test_static_clusters_stay_what_they_are_until_none_has_room(made):
    keys = torch.randn(400, 4, generator=torch.Generator().manual_seed(7))
    row = made(4, 400, ClusterOptions(10, 12, update="static"))
    row.enter_prompt(keys, 300)
    count, centroid, splits = row.count, row.centroid[: row.count].clone(), row.splits
    nearest_to = squares(centroid - keys[300]).masked_fill(row.size[:count] >= 12, torch.inf)
    for end in range(301, 401):
        assert row.enter(keys, end, range(row.count)) == []
        check(row, keys, end)
        assert (row.count > count) == (end > 12 * count)
    assert int(row.place[300]) == int(nearest_to.argmin())
    assert torch.equal(row.centroid[:count], centroid) and (row.splits, row.refused) == (splits, 0)


@both
def test_local_clusters_are_made_of_later_tokens_alone(made):
    keys = torch.randn(400, 4, generator=torch.Generator().manual_seed(7))
    row = made(4, 400, ClusterOptions(10, 30, update="local"))
    row.enter_prompt(keys, 300)
    count, place = row.count, row.place[:300].clone()
    for end in range(301, 401):
        assert row.enter(keys, end, range(row.count)) == []
        check(row, keys, end)
        assert row.pending == (end - 300) % 40
    assert torch.equal(row.place[:300], place) and bool((row.place[300:380] >= count).all())
    assert row.count >= count + 8


@both
def test_long_prompts_are_clustered_in_blocks(made):
    """What stands in the first block does not depend on what follows it."""
    keys = torch.randn(8192 + 512, 4, generator=torch.Generator().manual_seed(9))
    options = ClusterOptions(64, 128)
    row, first = made(4, len(keys), options), made(4, len(keys), options)
    row.enter_prompt(keys, len(keys))
    first.enter_prompt(keys, 8192)
    check(row, keys, len(keys))
    blocks = {int(cluster) for cluster in row.place[:8192].unique()}
    assert not blocks & {int(cluster) for cluster in row.place[8192:].unique()}
    assert row.threshold == first.threshold


@both
def test_a_copy_has_a_life_of_its_own(made):
    row, keys = wide_row(made, pending=16)
    row.enter(keys, 601, ())
    other = row.copy()
    other.enter(keys, 640, range(other.count))
    assert (row.left, row.pending, int(row.place[600])) == (601, 1, PENDING)
    check(row, keys, 601)
    check(other, keys, 640)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 4), "cluster_tokens must be at least 1"),
        ((8, 4), "at most cluster_tokens_max, got 8 and 4"),
        ((8, 8, 0.0), "split_factor must be above 0"),
        ((8, 8, 1.0, -1), "pending_tokens and sink_tokens at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        ClusterOptions(*arguments)
    with pytest.raises(ValueError, match="one of adaptive, static, local, got 'never'"):
        ClusterOptions(update="never")


@both
def test_a_row_without_width_is_refused(made):
    with pytest.raises(ValueError, match="width and tokens_max must be positive, got 0 and 5"):
        made(0, 5, ClusterOptions())


def test_scores_are_their_definitions():
    generator = torch.Generator().manual_seed(2)
    centroid = torch.randn(5, 2, 8, generator=generator)
    size, query = torch.tensor([1, 3, 9, 2, 4]), torch.randn(6, 8, generator=generator)
    products = torch.stack([centroid[:, head // 3] @ query[head] for head in range(6)])
    mass = torch.zeros(5)
    for head in range(6):
        weights = size * (0.3 * products[head]).exp()
        mass += weights / weights.sum()
    expected = {"sum": products.sum(0), "max": products.amax(0), "mass": mass}
    for score in SCORES:
        actual = cluster_scores(centroid, size, query, score, 0.3)
        torch.testing.assert_close(actual, expected[score])
    with pytest.raises(ValueError, match="score: must be one of sum, max, mass, got 'mean'"):
        cluster_scores(centroid, size, query, "mean", 0.3)


def test_clusters_are_taken_until_the_first_that_does_not_fit():
    scores = torch.tensor([1.0, 4.0, 2.0, 4.0, 3.0])
    tokens, pages = torch.tensor([1, 10, 2, 20, 30]), torch.tensor([1, 1, 1, 2, 3])

    def taken(most_tokens: int, most_pages: int) -> tuple[list[int], bool]:
        budgets = torch.tensor([most_tokens, most_pages])
        clusters, is_cut = best_within(scores, torch.stack([tokens, pages]), budgets)
        return clusters.tolist(), is_cut

    assert taken(100, 100) == ([1, 3, 4, 2, 0], False)
    assert taken(59, 100) == ([1, 3], False)  # though what comes after would fit
    assert taken(100, 6) == ([1, 3, 4], False)
    assert taken(9, 100) == ([1], True)
