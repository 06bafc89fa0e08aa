"""What the tuner predicts and trusts: recall first, then time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from python.tiny_models import has_native

from kvswap_torch.config import Memory, Prefetch, Selection, SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.ahead import TRUST_GAIN_MIN, decide
from kvswap_torch.tuning.choices import Choices, Recorded
from kvswap_torch.tuning.costs import Levels, SettingCosts
from kvswap_torch.tuning.disk import DiskModel
from kvswap_torch.tuning.layer_time import VERIFIED_PERIOD, LayerClock
from kvswap_torch.tuning.solver import Grid, solve
from kvswap_torch.tuning.step_model import LoadingModel, StepModel, Work, fit_steps
from kvswap_torch.tuning.traffic import Merging, Prefetched, Traffic, TrafficTable

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
LAYERS, STEPS, GROUP, CONTEXT = 4, 16, 4, 4096
MS = 1e-3


def rows(shift: int) -> torch.Tensor:
    """Eight groups a step, of which the four last are the four first of the next step."""
    step = torch.arange(STEPS)[:, None]
    return (4 * step + torch.arange(8) + shift).int()


def choices(guess: int = 0) -> Choices:
    """Predictions that are off by so many groups; none of the first layer."""
    ahead = (torch.full_like(rows(0), -1), *[rows(guess)] * (LAYERS - 1))
    held = [{8: 0.9} for _ in range(LAYERS)]
    recorded = Recorded(CONTEXT, (rows(0),) * LAYERS)
    return Choices(
        8 * GROUP,
        8,
        {GROUP: held},
        {GROUP: [1.0] * LAYERS},
        {GROUP: [recorded]},
        ahead={GROUP: [Recorded(CONTEXT, ahead)]},
    )


def calibrated(unfit: tuple[int, ...] = (), loss: float = 0.0) -> SimpleNamespace:
    true, predicted = ([{8: value} for _ in range(LAYERS)] for value in (0.9, 0.9 - loss))
    return SimpleNamespace(
        layers=LAYERS,
        kind="query_aware",
        true_query_layers=unfit,
        recall={("query_aware", "true"): true, ("query_aware", "predicted"): predicted},
    )


def costs(
    prefetch: Prefetch, request_s: float, *, guess: int = 0, query_s: float = 0.0, loss: float = 0.0
) -> SettingCosts:
    """Cores that compute for two milliseconds a layer, and a disk of so much for a request."""
    no_work = Work(LAYERS, 1, 0.0, 0.0, 0.0, 0.0).rows()
    steps = StepModel(
        {part: (0.0,) * len(row) for part, row in no_work.items()},
        {1: 2 * MS * LAYERS},
        {1: query_s},
    )
    return SettingCosts(
        batch=1,
        context=CONTEXT,
        shape=ModelShape(layers=LAYERS, heads=2, kv_heads=1, head_dim=16, element_bytes=2),
        base=SwapConfig(
            selection=Selection(max_step_tokens=1),
            memory=Memory(replacement="lru"),
            prefetch=prefetch,
        ),
        levels=Levels({8: (8,) * LAYERS}),
        steps=steps,
        loading=LoadingModel(),
        disk=DiskModel(request_s=request_s, latency_s=0.0, bytes_per_s=1e15),
        traffic=TrafficTable(choices(guess)),
        need=lambda config: {"total": config.memory.pages_per_layer, "record_bytes": 8192},
        losses=[{8: loss} for _ in range(LAYERS)],
    )


def decided(
    request_s: float, unfit: tuple[int, ...] = (), loss: float = 0.0, capacity: int = 64, **kind
):
    grid = Grid(groups=(GROUP,), ranks=(8,), capacities=(capacity,))

    def solve_with(prefetch, grids):
        def of(batch: int, context: int) -> SettingCosts:
            return costs(prefetch, request_s, loss=loss, **kind)

        return solve(of, grids, [(1, CONTEXT)], 1 << 30)

    return decide(calibrated(unfit, loss), solve_with, lambda context: grid)


def test_what_is_prefetched_is_read_early_and_the_rest_late():
    """Four new groups a step; predictions lag behind by two, or are ahead by two."""
    merging = Merging(8192, 0, 1 << 20)
    for guess, early, late in ((0, 4, 0), (-2, 2, 2), (2, 6, 0), (300, 8, 4)):
        table = TrafficTable(choices(guess))
        first, *others = table.prefetched(GROUP, 16, "lru", CONTEXT, merging)
        assert first is None, "of the first layer nothing is predicted"
        for each in others:
            assert (each.early.loads, each.late.loads) == (early, late)
            assert each.early.bytes_read == early * 8192
    no_page_to_spare = table.prefetched(GROUP, 8, "lru", CONTEXT, merging)
    assert no_page_to_spare == [None] * LAYERS


def clock(request_s: float, period: float = 4 * MS, scoring: float = 0.0) -> LayerClock:
    disk = DiskModel(request_s=request_s, latency_s=0.0, bytes_per_s=1e15)
    return LayerClock(LoadingModel(), disk, 2, period, query=0.5 * MS, scoring=scoring)


def reads(count: float) -> Traffic:
    return Traffic(8, count, count, count * 4096)


def test_a_layer_waits_for_what_is_not_hidden():
    """Two sequences, a millisecond a read."""
    assert clock(MS).plain(reads(3)).seconds == pytest.approx(6 * MS)
    trusted = clock(MS).trusted(reads(3))
    assert (trusted.wait, trusted.predict) == pytest.approx((2 * MS, 0.5 * MS))
    assert trusted.predicts and not clock(MS).plain(reads(3)).predicts
    verified = clock(MS, scoring=0.25 * MS).verified(Prefetched(reads(4), reads(1)))
    early = 8 * MS - VERIFIED_PERIOD * 4 * MS
    assert verified.wait == pytest.approx(early + 2 * MS)
    assert verified.predict == pytest.approx(0.75 * MS)
    assert verified.bytes_read == 2 * 5 * 4096


@given(st.floats(0, 1e-2), st.floats(0, 20), st.floats(0, 20), st.floats(0, 20), st.floats(0, 1e-2))
def test_a_verified_layer_is_never_slower_than_its_true_query_alone(
    request_s, count, early, late, period
):
    at = clock(request_s, period)
    best = at.best_verified(reads(count), Prefetched(reads(early), reads(late)))
    assert best.seconds <= at.plain(reads(count)).seconds
    assert at.best_verified(reads(count), None) == at.plain(reads(count))


def test_a_disk_so_fast_that_nothing_is_hidden_leaves_the_plain_true_query():
    found, _ = decided(request_s=1e-8, query_s=0.1 * MS)
    assert found.prefetch == Prefetch(mode="off")
    assert found.trusted == ()
    assert {each.way for each in found.layers} == {"true"}
    assert "makes no layer faster" in found.why


def test_predictions_that_prefetch_well_are_verified_where_trust_brings_little():
    """Reads that half a layer hides: a trusted prediction would save nothing but a scoring."""
    found, solved = decided(request_s=0.5 * MS)
    assert found.prefetch == Prefetch(mode="verify")
    assert solved[0].costs.base.prefetch.mode == "verify"
    assert [each.way for each in found.layers] == ["true", *["verify"] * (LAYERS - 1)]
    assert found.step_ms["trust"] > (1 - TRUST_GAIN_MIN) * found.step_ms["verify"]
    assert "nothing is trusted" in found.why


def test_trust_is_taken_where_answers_stay_whole_and_it_is_clearly_faster():
    """Predictions that read the wrong groups, yet find as much: verified they read twice."""
    found, solved = decided(request_s=MS, unfit=(2,), guess=300)
    assert found.prefetch == Prefetch(mode="trust", skip_layers=(2,))
    assert found.trusted == (1, 3)
    assert found.step_ms["trust"] <= (1 - TRUST_GAIN_MIN) * found.step_ms["verify"]
    assert solved[0].chosen.step_seconds == pytest.approx(MS * found.step_ms["trust"])
    bad = found.layers[2]
    assert bad.way == "true" and "loses more than 3% of its recall" in bad.why
    told = "\n".join(found.lines())
    assert "trusted: layers 1, 3 (" in told and "mass held 0.900 by prediction" in told
    assert found.to_json()["layers"][1]["ms"] < found.to_json()["layers"][1]["ms_true"]


def test_the_recall_that_is_asked_for_holds_where_predictions_are_trusted():
    """They lose a hundredth and more of what the true query finds: then they are not trusted."""
    assert costs(Prefetch(mode="trust", skip_layers=(1,)), MS, loss=0.2).recall(
        setting := solve_setting()
    ) == pytest.approx(0.9 - 2 * 0.2 / LAYERS)
    assert costs(Prefetch(mode="verify"), MS, loss=0.2).recall(setting) == pytest.approx(0.9)
    found, _ = decided(request_s=MS, guess=300, loss=0.2)
    assert found.trusted == () and "holds as much in this memory" in found.why


def solve_setting():
    grid = Grid(groups=(GROUP,), ranks=(8,), capacities=(64,))
    at = costs(Prefetch(mode="off"), MS)
    return solve(lambda *_: at, lambda _: grid, [(1, CONTEXT)], 1 << 30)[0].chosen.setting


def test_only_what_is_read_ahead_hides_for_the_papers_solver():
    """The first layer does not count: no setting hides it."""
    setting = solve_setting()
    alone, trusted = (costs(Prefetch(mode=mode), MS) for mode in ("off", "trust"))
    assert alone.io_seconds(setting) > 0 == alone.model_seconds(setting)
    assert (
        trusted.model_seconds(setting) == trusted.io_seconds(setting) == alone.io_seconds(setting)
    )
    some = costs(Prefetch(mode="trust", skip_layers=(1, 2)), MS)
    assert some.model_seconds(setting) == pytest.approx(some.io_seconds(setting) / 3)
    slow = costs(Prefetch(mode="verify"), 3 * MS)  # of which half a layer's time hides one
    assert slow.model_seconds(setting) == pytest.approx(slow.io_seconds(setting) / 3)


@given(
    st.floats(1e-8, 1e-2),
    st.sets(st.integers(1, LAYERS - 1)),
    st.sampled_from([0, 1, 2, 3, 300]),
    st.floats(0, 3e-3),
)
def test_a_layer_whose_prediction_is_bad_is_never_trusted(request_s, unfit, guess, query_s):
    found, solved = decided(request_s, tuple(sorted(unfit)), guess=guess, query_s=query_s)
    assert not unfit & set(found.trusted) and 0 not in found.trusted
    assert bool(found.trusted) == (found.prefetch.mode == "trust")
    chosen, layers = solved[0].chosen, solved[0].costs.cost(solved[0].chosen.setting).layers
    assert len(found.layers) == len(layers) == LAYERS
    assert 1e3 * chosen.step_seconds <= min(found.step_ms.values()) / (1 - TRUST_GAIN_MIN) + 1e-6
    # What is predicted pays; what is not would not.
    for each in found.layers:
        assert each.way == "true" or each.ms <= each.ms_true


def test_a_budget_too_small_for_all_is_told():
    grid = Grid(groups=(GROUP,), ranks=(8,), capacities=(64,))

    def solve_with(prefetch, grids):
        return solve(lambda *_: costs(prefetch, MS), grids, [(1, CONTEXT)], 1)

    with pytest.raises(BudgetError, match="more than the budget of 1"):
        decide(calibrated(), solve_with, lambda context: grid)


def test_the_cost_of_a_prediction_is_that_of_a_layer():
    work = Work(6, 1, 1.0, 1.0, 1.0, 1.0)
    parts = dict.fromkeys(("select", "plan", "attend", "append", "model"), MS)
    points = [(work, parts | {"predict": seconds}) for seconds in (4 * MS, 5 * MS, 90 * MS)]
    assert fit_steps(points, 5).predict_seconds(1) == pytest.approx(MS)
    assert fit_steps(points).predict_seconds(1) == 0.0
