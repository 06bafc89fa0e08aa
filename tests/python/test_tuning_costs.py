"""The cost model's parts: merged reads, traffic, fits, rank levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch import SwapConfig
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.choices import Choices, Recorded, stretched
from kvswap_torch.tuning.costs import Levels, SettingCosts, make_levels
from kvswap_torch.tuning.disk import DiskModel
from kvswap_torch.tuning.solver import Setting
from kvswap_torch.tuning.step_model import (
    LayerLoads,
    LoadingModel,
    LoadingStep,
    StepModel,
    Work,
    disk_seconds,
    dot,
    fit_loading,
    fit_nonnegative,
    fit_steps,
)
from kvswap_torch.tuning.timing import Place, Timing, TimingPlan, Turnover, loading_steps
from kvswap_torch.tuning.traffic import Merging, Replayed, TrafficTable, pick_merge_gap, read_sizes

NO_WORK = Work(2, 1, 0.0, 0.0, 0.0, 0.0)
groups = st.lists(st.integers(0, 300), unique=True, max_size=60).map(sorted)


@given(groups, st.integers(0, 40_000), st.integers(4096, 100_000))
def test_merged_reads_are_those_that_the_engine_makes(chosen, gap, most):
    """Against a walk over bytes: a read goes on while gap and length allow."""
    merging = Merging(4096, gap, most)
    runs: list[list[int]] = []
    for group in chosen:
        begin, end = group * 4096, (group + 1) * 4096
        if runs and begin - runs[-1][1] <= gap and end - runs[-1][0] <= most:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
    assert read_sizes(chosen, merging) == [end - begin for begin, end in runs]


def test_a_record_is_fetched_once():
    with pytest.raises(ValueError, match="places must differ"):
        read_sizes([3, 5, 3], Merging(4096, 0, 4096))


@given(groups, st.sampled_from([1, 2, 4, 16]), st.integers(1, 8))
def test_stretching_keeps_groups_apart_and_inside(chosen, size, factor):
    context = 301 * size
    moved = stretched(np.array(chosen, dtype=np.int64), size, context, factor * context)
    assert len(moved) <= len(chosen)
    assert len(moved) == len(chosen) or factor == 1
    assert np.all(np.diff(moved) > 0)
    if len(moved):
        assert moved[0] >= 0
        assert moved[-1] < factor * context // size


def recorded_choices(steps: int = 12) -> Choices:
    rows = torch.tensor([[step, step + 1, -1] for step in range(steps)], dtype=torch.int32)
    held = [{8: 0.5, 16: 0.9}, {8: 0.7, 16: 0.7}]
    return Choices(12, 16, {4: held}, {4: [1.0, 1.0]}, {4: [Recorded(64, (rows, rows))]})


def test_traffic_of_a_window_that_moves_by_one():
    table = TrafficTable(recorded_choices())
    traffic = table.get(4, 8, "fifo", 64, Merging(4096, 0, 1 << 20))
    assert len(traffic) == 2
    assert (traffic[0].attended, traffic[0].loads, traffic[0].reads) == (2, 1, 1)
    assert traffic[0].bytes_read == 4096
    assert traffic[0].hit_rate == 0.5


def test_fewer_groups_of_a_step_are_chosen_again_as_often():
    """800 groups a step, 100 of them new, in pairs of neighbours: a quarter is as much alike."""
    groups = torch.arange(1200, dtype=torch.int32)
    groups = groups[groups % 3 > 0][:800] + 150 * torch.arange(20, dtype=torch.int32)[:, None]
    held, context = {4: [{8: 0.5}]}, 4 * 64 * 100
    table = TrafficTable(Choices(3200, 8, held, {4: [1.0]}, {4: [Recorded(context, (groups,))]}))
    whole, fewer = (Replayed(table, 4, context, 1, most) for most in (None, 200))
    again = beside = 0
    for step in range(20):
        ((chosen,),) = fewer(step)
        assert len(chosen) == 200 and chosen == sorted(chosen)
        assert set(chosen) <= set(whole(step)[0][0]) and len(whole(step)[0][0]) == 800
        again += len(set(chosen) & set(fewer(step - 1)[0][0])) if step else 0
        beside += sum(group + 1 in chosen for group in chosen)
    assert 0.8 < again / (19 * 200) < 0.95  # 0.875 of all of them
    assert 0.45 < beside / (20 * 200) <= 0.5


def costs_of_two_layers(look_ahead: bool) -> SettingCosts:
    """A disk of a millisecond a read, cores of a tenth of that, and no other work."""
    rows = NO_WORK.rows()
    return SettingCosts(
        batch=1,
        context=64,
        shape=ModelShape(layers=2, heads=2, kv_heads=1, head_dim=16, element_bytes=2),
        base=SwapConfig(select_queries_max=1, look_ahead=look_ahead),
        levels=Levels({8: (8, 8)}),
        steps=StepModel({part: (0.0,) * len(row) for part, row in rows.items()}, {1: 0.0}),
        loading=LoadingModel(read_s=1e-4),
        disk=DiskModel(request_s=1e-3, latency_s=0.0, bytes_per_s=1e15),
        traffic=TrafficTable(recorded_choices()),
        need=lambda config: {"total": config.pages_max, "record_bytes": 8192},
    )


def test_where_layers_share_pages_each_step_reads_what_it_attends():
    """Two groups a step, one of them new; neighbours are one read."""
    own, shared = (Setting(4, 8, 12, shares_pages=shares) for shares in (False, True))
    alone, ahead = (costs_of_two_layers(look_ahead) for look_ahead in (False, True))
    assert (alone.config(own).resident_layers, alone.config(shared).resident_layers) == (None, 2)
    assert alone.cost(own).parts["load"] == pytest.approx(2 * 1e-4)
    assert alone.cost(own).bytes_read == 2 * 8192
    # By its own query each layer reads the new group besides; the first never looks ahead.
    for costs, besides in ((alone, 2), (ahead, 1)):
        assert costs.cost(shared).bytes_read == (2 * 2 + besides) * 8192
        assert costs.cost(shared).hit_rate == 0.0
    assert alone.cost(shared).parts["load"] == pytest.approx(4 * 1e-4)
    assert ahead.cost(shared).parts["load"] == pytest.approx(3 * 1e-4)
    assert not alone.is_whole(Setting(4, 8, 64, shares_pages=True))


def test_a_gap_is_read_over_where_a_request_costs_more_than_its_bytes():
    """Steps of two new groups, with two between them that nobody wants."""
    steps = torch.tensor([[9 * step, 9 * step + 3] for step in range(20)], dtype=torch.int32)
    held = {4: [{8: 0.5}]}
    choices = Choices(8, 8, held, {4: [1.0]}, {4: [Recorded(9 * 4 * 21, (steps,))]})
    traffic, usual = TrafficTable(choices), SwapConfig()
    slow_request = DiskModel(request_s=1e-3, latency_s=0.0, bytes_per_s=1e9)
    slow_bytes = DiskModel(request_s=0.0, latency_s=0.0, bytes_per_s=1e6)

    def gap(disk, token_bytes, config=usual):
        return pick_merge_gap(traffic, disk, config, token_bytes, 9 * 4 * 21)

    assert usual.merge_gap_bytes == 16 << 10
    assert gap(slow_request, 4096) == 32 << 10  # two groups of 16 KiB
    assert gap(slow_bytes, 1024) == 0
    assert gap(slow_bytes, 4096) == usual.merge_gap_bytes  # it merges nothing either
    assert gap(slow_request, 1024) == usual.merge_gap_bytes


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 99))
def test_fits_find_what_made_the_numbers(coefficients, seed):
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0.1, 3, (12, 3))
    values = rows @ coefficients
    found = fit_nonnegative(rows, values)
    assert min(found) >= 0
    for row, value in zip(rows, values, strict=True):
        assert dot(row, found) == pytest.approx(value, rel=1e-6, abs=1e-6)


def test_fits_never_take_time_back():
    found = fit_nonnegative([[1, 1], [1, 2], [1, 3]], [3.0, 2.0, 1.0])
    assert found[1] == 0.0 and found[0] > 0


def make_parts(work: Work) -> dict[str, float]:
    return {
        "select": 1e-9 * work.scanned_bytes,
        "plan": 1e-6 * work.groups,
        "attend": 1e-7 * work.attended_tokens,
        "append": 1e-5 * work.batch * work.layers,
        "model": 0.01 * work.batch,
    }


def test_a_step_model_predicts_settings_it_has_not_seen():
    rng = np.random.default_rng(0)

    def draw(batch: int) -> Work:
        return Work(6, batch, *rng.uniform(1e3, 1e6, 4).tolist())

    points = [(work, make_parts(work)) for work in (draw(b) for b in (1, 1, 1, 4, 4, 4, 4, 1))]
    points[0][1]["model"] *= 7  # a slow spell
    other = draw(2)
    found = fit_steps(points).parts(other)
    assert found == pytest.approx(make_parts(other), rel=1e-3)
    with pytest.raises(ValueError, match="must have measured points"):
        fit_steps([])


DISK = DiskModel(1e-6, 1e-4, 1e9)


def make_step(loading: LoadingModel, loads: LayerLoads, seconds_without: float) -> LoadingStep:
    """Six layers, four of them ahead."""
    disk = disk_seconds(DISK, loads)
    seconds = seconds_without + 6 * loading.busy(loads)
    seconds += 4 * loading.waited(disk, seconds_without / 6) + 2 * disk
    return LoadingStep(seconds, seconds_without, 6, 4, loads)


def test_loading_is_found_from_pairs_of_steps():
    truth = LoadingModel(layer_s=6e-5, first_s=4e-6, read_s=7e-6, byte_s=2e-10, beside=0.8)
    rng = np.random.default_rng(0)

    def draw() -> LoadingStep:
        reads = float(rng.integers(1, 600))
        loads = LayerLoads(reads, reads * float(rng.choice([4096, 16384, 65536])))
        return make_step(truth, loads, float(rng.uniform(4e-3, 2e-2)))

    found = fit_loading([draw() for _ in range(24)], DISK)
    for step in (draw() for _ in range(12)):
        again = make_step(found, step.loads, step.seconds_without)
        assert again.seconds == pytest.approx(step.seconds, rel=0.05)
    assert found.beside == pytest.approx(truth.beside, rel=0.2)


def test_a_layer_that_loads_nothing_costs_and_waits_for_nothing():
    model = LoadingModel(1.0, 1.0, 1.0, 1.0, 0.5)
    nothing = LayerLoads(0.0, 0.0)
    assert model.busy(nothing) == disk_seconds(DISK, nothing) == 0.0
    assert model.waited(0.0, 1.0) == 0.0
    assert fit_loading([], DISK) == LoadingModel()


def test_steps_with_loads_are_paired_with_those_of_their_place_without():
    place, alone = Place(1, 4096, 4, 8), Place(2, 4096, 4, 8)
    idle = {"reads": 0.0, "bytes_read": 0.0}
    busy = {"reads": 60.0, "bytes_read": 6e5}
    timings = [
        Timing(place, 0.030, {}, busy),
        Timing(place, 0.010, {}, idle),
        Timing(alone, 0.050, {}, busy),
    ]
    config = SwapConfig(look_ahead=True, true_query_layers=(1,))
    loads = LayerLoads(10.0, 1e5)
    assert loading_steps(timings, config, 6) == [LoadingStep(0.030, 0.010, 6, 4, loads)]


def test_levels_rise_and_go_where_recall_is_gained():
    recall = [{8: 0.9, 16: 0.9, 32: 0.9}, {8: 0.1, 16: 0.5, 32: 0.95}]
    levels = make_levels(recall)
    assert levels.ranks[8] == (8, 8)
    # Gains first, then layers with the fewest.
    assert levels.ranks[16] == (16, 16)
    assert levels.ranks[32] == (32, 32)
    assert make_levels([{8: 0.9, 16: 0.9, 24: 0.9}, {8: 0.1, 16: 0.5, 24: 0.95}]).ranks[16] == (
        8,
        24,
    )
    assert list(make_levels(recall, uniform=True).ranks.values()) == [(8, 8), (16, 16), (32, 32)]
    totals = [sum(levels.ranks[level]) for level in levels.values]
    assert totals == sorted(set(totals))


def test_places_to_time_stay_within_what_is_filled():
    plan = TimingPlan(8, 1 << 20, 6144, (8, 128), (1, 16), 400)
    assert plan.batches == [1, 2, 4, 8]
    places = plan.places()
    assert len(places) == len(set(places))
    assert all(place.batch * place.context * 6144 <= 3 << 29 for place in places)
    assert {place.batch for place in places} == {1, 2, 4, 8}
    assert TimingPlan(3, 2048, 6144, (8, 8), (4, 4), 400).batches == [1, 2, 3]


def test_turnover_loads_as_many_as_asked():
    turnover = Turnover(layers=2, batch=3, sealed=500, groups=40, loads=7)
    before = turnover(0)
    for step in range(1, 6):
        now = turnover(step)
        for layer in range(2):
            for sequence in range(3):
                new = set(now[layer][sequence]) - set(before[layer][sequence])
                assert len(new) == 7 and len(set(now[layer][sequence])) == 40
        before = now
