"""Settings from a budget: they fit it, they use it, and too small a one is explained."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvswap_torch import BudgetError, ConfigError, SwapConfig, presets
from kvswap_torch.config.solution import Solution
from kvswap_torch.hf.settings import Budget, FirstPass, default_config, settle
from kvswap_torch.preset import find
from kvswap_torch.preset.definition import Shape
from kvswap_torch.sizing import (
    ModelShape,
    Request,
    effective_ranks,
    fit_budget,
    native_options,
    spend_budget,
)
from tests.python.tiny_models import has_native

if has_native():
    from kvswap_torch import _C
pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

SHAPE = ModelShape(layers=4, heads=8, kv_heads=2, head_dim=16, element_bytes=2)


def plain_need(config: SwapConfig, shape: ModelShape, context: int, batch: int) -> dict[str, int]:
    """A simple stand-in for the session's own count."""
    page = 2 * shape.width * config.group_tokens * shape.element_bytes
    ranks = sum(effective_ranks(config, shape, calibrated=False))
    element = {"int8": 1, "int4": 0.5}.get(config.summary_dtype, shape.element_bytes)
    sharing = min(config.resident_layers or shape.layers, shape.layers)
    uses = {
        "pages": batch * (sharing * config.pages_max + shape.layers * 20) * page,
        "summary": math.ceil(batch * context * ranks * element),
        "projections": (4 if config.summary_dtype == "int4" else 8) * shape.width * ranks,
    }
    return uses | {name: sum(uses.values()) for name in ("total", "least")}


def plain_retaining_need(config: SwapConfig, shape: ModelShape) -> dict[str, int]:
    """The same with retained tokens."""
    uses = plain_need(config, shape, 4000, 1)
    kept = config.retention.tokens * 2 * shape.width * shape.element_bytes * shape.layers
    total = uses["total"] + kept
    return uses | {"kept": kept, "total": total, "least": total}


def native_need(
    config: SwapConfig, shape: ModelShape, context: int, batch: int, budget: int | None = None
) -> dict[str, int]:
    options = native_options(
        config,
        shape,
        kv_memory_bytes=budget,
        dtype={2: torch.bfloat16, 4: torch.float32}[shape.element_bytes],
        ranks=list(effective_ranks(config, shape, calibrated=False)),
    )
    return _C.memory_need(options, batch, context, 4096)


shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 32),
    heads=st.just(8),
    kv_heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([8, 64, 128]),
    element_bytes=st.sampled_from([2, 4]),
)
configs = st.builds(
    lambda rank, spare, **rest: SwapConfig(
        rank=rank, pages_max=max(rest["groups_max"] + spare, 16), **rest
    ),
    rank=st.integers(1, 200),
    spare=st.integers(0, 300),
    groups_max=st.integers(1, 300),
    group_tokens=st.sampled_from([1, 4, 16]),
    tail_tokens=st.integers(0, 64),
    summary_dtype=st.sampled_from(["model", "int8", "int4"]),
)


def need_under(
    config: SwapConfig, shape: ModelShape, request: Request, plain: bool
) -> dict[str, int]:
    """As the sum of a few parts, or as the engine counts it under that budget."""
    if plain:
        return plain_need(config, shape, request.context, request.batch)
    return native_need(config, shape, request.context, request.batch, request.kv_memory_bytes)


@pytest.mark.parametrize("plain", [True, False])
@given(data=st.data())
def test_never_over_the_budget(plain, data):
    shape, config = data.draw(shapes), data.draw(configs)
    context, batch = data.draw(st.integers(1, 200_000)), data.draw(st.integers(1, 8))
    budget = data.draw(st.integers(1 << 16, 1 << 32))
    sharing = functools.partial(fit_budget, may_share=True)
    fit = data.draw(st.sampled_from([fit_budget, sharing, spend_budget]))

    def fitted(request: Request) -> SwapConfig:
        def need(settings):
            return need_under(settings, shape, request, plain)

        chosen = fit(request, shape, config, need)
        assert need(chosen)["total"] <= request.kv_memory_bytes
        return chosen

    try:
        chosen = fitted(Request(budget, context, batch))
    except BudgetError as error:
        least = int(str(error).split("at least ")[1].split(" ")[0])
        assert least > budget
        fitted(Request(least, context, batch))  # what the message says suffices does
        with pytest.raises(BudgetError):
            fitted(Request(least - 1, context, batch))
        return
    assert chosen.group_tokens == config.group_tokens
    if fit is not spend_budget:
        assert chosen.groups_max <= max(config.groups_max, 8)
        assert max(chosen.ranks(shape.layers)) <= min(config.rank, shape.width)
        assert chosen.pages_max <= max(config.pages_max, config.select_queries_max)


def missed(config: SwapConfig, context: int, width: int) -> float:
    if config.groups_max * config.group_tokens >= context and config.resident_layers is None:
        return -1.0
    columns = 2 * config.rank
    table = _C.missed_by_columns()[config.summary_dtype]
    share = min(share for by, share in table if min(by, width) <= columns)
    return share + _C.missed_by_tokens(config.groups_max * config.group_tokens, context)


REUSE_WORTH = 0.02  # nats
WIDE = dataclasses.replace(SHAPE, head_dim=96)


def spent(budget: int, context: int = 4096) -> SwapConfig:
    def need(settings):
        return plain_need(settings, WIDE, context, 1)

    return spend_budget(Request(budget, context, 1), WIDE, SwapConfig(), need)


def test_a_real_shape_shares_pages_where_there_is_room_for_few():
    """A tenth of the KV memory. On a device nothing is shared."""
    shape = ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, element_bytes=2)
    budget = shape.kv_bytes(4096) // 10

    def need(settings):
        return native_need(settings, shape, 4250, 1, budget)

    def chosen(on_device: bool) -> SwapConfig:
        request = Request(budget, 4250, 1)
        return spend_budget(request, shape, default_config(shape, 4250), need, on_device)

    here, there = chosen(on_device=False), chosen(on_device=True)
    assert (here.groups_max, here.rank, here.resident_layers) == (100, 28, 2)
    assert there.groups_max < 30 and there.resident_layers is None


def test_a_device_is_not_given_rows_that_it_cannot_score():
    budget = Budget(1 << 20, 8192, 1)

    def need(config, batch, context):
        return plain_need(config, WIDE, context, batch)

    dtypes = [
        settle(None, WIDE, budget, need, on_device=on_device).summary_dtype
        for on_device in (False, True)
    ]
    assert dtypes == ["int4", "int8"]
    asked = SwapConfig(summary_dtype="int4", rank=8)
    assert settle(asked, WIDE, budget, need, on_device=True).summary_dtype == "int4"


@given(budget=st.integers(1 << 20, 1 << 28), more=st.integers(0, 1 << 26))
def test_more_memory_never_misses_more(budget, more):
    try:
        small = spent(budget, 8192)
    except BudgetError:
        assume(False)
    ample = spent(budget + more, 8192)
    # A reuse buffer is worth a little of it.
    gives_reuse = ample.resident_layers is None and small.resident_layers is not None
    least = missed(small, 8192, WIDE.width) + (REUSE_WORTH if gives_reuse else 0.0)
    assert missed(ample, 8192, WIDE.width) <= least + 1e-9


def test_what_memory_is_spent_on():
    """Columns first, then groups with them, then spare pages; or the whole context."""
    small, tight, middle, ample = (spent(int(size * 2**20)) for size in (1.0, 1.6, 2.6, 9))
    assert small.rank >= 12 and 8 <= small.groups_max < 60
    # Pages of two layers are worth reading all anew, until each layer has enough of its own.
    assert small.resident_layers == tight.resident_layers == 2
    assert (tight.rank, tight.groups_max) == (32, 100)
    assert middle.resident_layers is ample.resident_layers is None
    assert small.summary_dtype == middle.summary_dtype == "int4"
    assert (middle.rank, middle.groups_max) == (32, 100) and middle.pages_max < 200
    assert ample.summary_dtype == "int8", "as many columns, and none rounded by more than it must"
    assert (ample.rank, ample.groups_max, ample.pages_max) == (32, 100, 200)
    exact = spent(64 << 20)
    assert exact.groups_max == exact.pages_max == 1024 and exact.rank == 32
    # As soon as the whole context fits it is kept, though with fewer columns.
    assert spent(14 << 20).groups_max == 1024


def fitted(config: SwapConfig, share: int, **how: bool) -> SwapConfig:
    """Under that share of the KV of 4,096 tokens, as the engine counts."""
    shape = ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, element_bytes=2)
    request = Request(shape.kv_bytes(4096) // share, 4250, 1)

    def need(settings):
        return native_need(settings, shape, 4250, 1, request.kv_memory_bytes)

    return fit_budget(request, shape, config, need, **how)


def test_a_method_keeps_its_groups_by_two_layers_pages_where_many_would_be_missing():
    dynakv = SwapConfig.preset("dynakv", shape=Shape(layers=30, kv_heads=3, head_dim=64))
    assert dynakv.selection.top_k_groups == 128
    sizes = [
        (each.selection.top_k_groups, each.memory.resident_layers)
        for each in (fitted(dynakv, share, may_share=True) for share in (2, 3, 4))
    ]
    # At a half a few are missing: those that are there need not be read again.
    assert sizes == [(107, None), (128, 2), (128, 2)]
    apart = fitted(dynakv, 4)
    assert apart.selection.top_k_groups == 21 and apart.memory.resident_layers is None
    # With pages for more layers than there are, each has its own.
    each = fitted(dynakv.with_settings({"memory.resident_layers": 64}), 4)
    assert each.selection.top_k_groups == 21


def test_what_was_said_or_measured_does_not_share():
    """Layers that a config names, a tuner's solutions, a device, a method that selects nothing."""

    def need(config, batch, context):
        return plain_need(config, SHAPE, context, batch)

    config = SwapConfig(rank=8, groups_max=400, pages_max=400, group_tokens=4)
    budget = Budget(1 << 20, 4096, 1)
    shared = settle(config, SHAPE, budget, need)
    assert shared.resident_layers == 2 and shared.groups_max > 100
    named = config.with_settings({"memory.resident_layers": 3})
    assert settle(named, SHAPE, budget, need).resident_layers == 3
    assert settle(config, SHAPE, budget, need, on_device=True).resident_layers is None
    alone = config.with_settings({"summary.kind": "none", "summary.rank": 32})
    retained = {"retention": {"policy": "snapkv", "tokens": 64}}
    assert (
        settle(dataclasses.replace(alone, **retained), SHAPE, budget, need).resident_layers is None
    )
    settings = {"selection.top_k_groups": 400, "memory.pages_per_layer": 400}
    tuned = dataclasses.replace(config, solutions=(Solution(1, 4096, settings),))
    assert settle(tuned, SHAPE, budget, need).resident_layers is None


@pytest.mark.parametrize("rank", [30, (30, 16, 8, 2)])
def test_a_budget_cuts_whole_pairs_of_channels(rank):
    config = SwapConfig(projection_kind="rope_pairs", rank=rank)

    def need(candidate: SwapConfig) -> dict[str, int]:
        return plain_need(candidate, SHAPE, 4096, 1)

    found = set()
    for kib in range(200, 2000, 16):
        with contextlib.suppress(BudgetError):
            found.add(fit_budget(Request(kib << 10, 4096, 1), SHAPE, config, need).rank)
    assert rank in found and len(found) > 3
    for ranks in found:
        every = ranks if isinstance(ranks, tuple) else (ranks,)
        assert not any(each % 2 for each in every) and min(every) >= 2


def test_a_crop_sets_aside_no_memory():
    """What returns to the tail is read to buffers that long chunks have: a longer tail is pages."""
    shape = ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, element_bytes=2)

    def need(recent_tokens: int) -> dict[str, int]:
        config = SwapConfig(tail_tokens=recent_tokens)
        return native_need(config, shape, 4246, 1, 7 << 20)

    short, long = need(32), need(160)
    more = {use: long[use] - short[use] for use in short if long[use] != short[use]}
    pages = 30 * (160 - 32) * 3 * (64 + 64) * 2
    assert more["pages"] == pages
    assert more["summary"] < 0, "what is in the tail is not summarised"
    assert more["total"] <= pages
    assert set(more) <= {"pages", "summary", "scratch", "tables", "least", "total"}


def test_what_is_missed_between_the_measured_numbers():
    def missed(tokens: int, context: int = 4096) -> float:
        return _C.missed_by_tokens(tokens, context)

    assert missed(8) == missed(32) == 0.21
    assert missed(192) == pytest.approx((0.085 + 0.035) / 2)
    assert missed(400) == pytest.approx(0.01) == missed(4000)
    values = [missed(tokens) for tokens in range(8, 500)]
    assert values == sorted(values, reverse=True)
    assert missed(800, 8000) == missed(400) < missed(400, 8000) == missed(200)


def test_a_long_context_has_twice_as_many_groups():
    """Whether the context is promised or that of the first pass; with no budget too."""
    short, long = default_config(SHAPE, 6144), default_config(SHAPE, 6145)
    assert (short.groups_max, short.pages_max) == (100, 200)
    assert (long.groups_max, long.pages_max) == (200, 400)
    assert settled(None, Budget(None, 8192, 1)) == long
    ample = settled(None, Budget(256 << 20), FirstPass(batch=1, tokens=1_000_000))
    assert (ample.groups_max, ample.pages_max) == (200, 400)
    given = SwapConfig(score="mass")
    assert settled(given, Budget(1 << 30, 1_000_000, 1)).groups_max == 100


def test_a_real_shape_attends_twice_as_much_of_a_long_context():
    """An eighth and a thirteenth of the KV memory of 8,086 tokens."""
    shape = ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, element_bytes=2)
    for share in (8, 13):
        budget = shape.kv_bytes(7936) // share

        def need(settings, batch, context, budget=budget):
            return native_need(settings, shape, context, batch, budget)

        chosen = settle(None, shape, Budget(budget, 8086, 1), need)
        assert (chosen.groups_max, chosen.resident_layers) == (200, 2)


def test_a_rank_for_each_layer_keeps_its_proportions():
    config = SwapConfig(rank=(8, 32, 8, 16))

    def need(settings):
        return plain_need(settings, SHAPE, 4096, 1)

    chosen = fit_budget(Request(800 << 10, 4096, 1), SHAPE, config, need)
    assert chosen.rank[0] == chosen.rank[2] == 8 < chosen.rank[3] < chosen.rank[1] < 32


def test_too_small_is_explained():
    def need(settings):
        return plain_need(settings, SHAPE, 4096, 2)

    with pytest.raises(BudgetError) as caught:
        fit_budget(Request(1000, 4096, 2), SHAPE, SwapConfig(), need)
    for words in ("must be at least", "max_context 4096", "max_batch 2", "got 1000", "pages",
                  "summary", "Lower max_context"):  # fmt: skip
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="must be positive"):
        Request(1, 0, 1)


def test_effective_ranks():
    config = SwapConfig(rank=24)
    assert effective_ranks(config, SHAPE, calibrated=True) == (24,) * 4
    assert effective_ranks(config, SHAPE, calibrated=False) == (32,) * 4  # doubled, to the width
    assert SHAPE.kv_bytes(10) == 2 * 4 * 32 * 2 * 10


# What the cache makes of what its user said.


def settled(config, budget, first=None):
    return settle(
        config, SHAPE, budget, lambda c, batch, context: plain_need(c, SHAPE, context, batch), first
    )


def test_without_a_budget_the_config_stands():
    config = SwapConfig(rank=16)
    assert settled(config, Budget()) == config
    assert settled(None, Budget()) == default_config(SHAPE, 1)
    narrow = dataclasses.replace(SHAPE, head_dim=8)
    assert default_config(narrow, 1).rank == 16  # never wider than the keys


def test_a_table_gives_the_nearest_solution():
    rows = [{"batch": b, "context": c, "settings": {"groups_max": g}}
            for b, c, g in ((1, 4096, 40), (1, 65536, 90), (8, 4096, 20))]  # fmt: skip
    config = SwapConfig(table=tuple(rows))
    assert Budget().matters(config) and not Budget().matters(SwapConfig())
    assert settled(config, Budget(max_context=8192, max_batch=1)).groups_max == 40
    assert settled(config, Budget(), FirstPass(batch=8, tokens=3000)).groups_max == 20
    assert settled(config, Budget()).groups_max == config.groups_max  # nothing known yet


def test_a_config_that_is_to_be_divided_is_divided_like_the_defaults():
    config = default_config(SHAPE, 1)
    for limits in ((600 << 10, 4096, 1), (1200 << 10, 8192, 1), (None, 8192, 1)):
        divided = settled(config, Budget(*limits, divides=True))
        assert divided == settled(None, Budget(*limits)) != settled(config, Budget(*limits))
    assert Budget(divides=True).matters(config), "a long context has more groups"


def test_a_budget_with_a_config_only_lowers():
    config = SwapConfig(rank=16, groups_max=50, pages_max=60)
    rich = settled(config, Budget(1 << 30, 4096, 1))
    assert (rich.rank, rich.groups_max, rich.pages_max) == (16, 50, 60)
    poor = settled(config, Budget(600 << 10, 4096, 1))
    assert poor.groups_max < 50 and poor.pages_max < 60


@pytest.mark.parametrize("name", ["prkv", "prkv-auto", "arkv-recall"])
def test_a_budget_lowers_retained_tokens_with_the_groups(name):
    """Of 32 groups and 768 tokens 8 groups and 192: the memory of tokens is the groups' too."""
    config = SwapConfig.preset(name)
    most, tokens = config.selection.top_k_groups, config.retention.tokens
    need = functools.partial(plain_retaining_need, shape=SHAPE)
    seen = set()
    whole = need(config)["total"]
    for part in range(1, 33):
        budget = whole * part // 32
        with contextlib.suppress(BudgetError, ConfigError):
            chosen = fit_budget(Request(budget, 4000, 1), SHAPE, config, need)
            assert need(chosen)["total"] <= budget
            groups = chosen.selection.top_k_groups
            assert chosen.retention.tokens == tokens * groups // most
            seen.add(groups)
    assert min(seen) < most // 2 and max(seen) == most and len(seen) > 4


def test_a_budget_leaves_retained_tokens_that_are_no_share():
    """ShadowKV's outliers, and tokens that a user gives worths, are as many as was said."""
    for settings in (
        {"retention": {"policy": "user", "tokens": 64}},
        {"retention": {"policy": "key_outliers", "tokens": 64}, "summary": {"kind": "mean"}},
    ):
        config = SwapConfig(**settings)

        def need(candidate: SwapConfig) -> dict[str, int]:
            return plain_retaining_need(candidate, SHAPE)

        request = Request(need(config)["total"] // 2, 4000, 1)
        chosen = fit_budget(request, SHAPE, config, need)
        assert chosen.selection.top_k_groups < config.selection.top_k_groups
        assert chosen.retention.tokens == 64


@pytest.mark.parametrize("name", ["snapkv", "tova", "arkv-origin", "arkv-quant"])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_retained_tokens_take_their_own_bytes(name, element_bytes):
    """At most a tenth more, whatever the disk reads at once and whichever heads retain."""
    sizes = {"layers": 30, "kv_heads": 3, "head_dim": 64, "element_bytes": element_bytes}
    shape, config = ModelShape(heads=9, **sizes), SwapConfig.preset(name, shape=Shape(**sizes))
    kept = native_need(config, shape, 4352, 1)["kept"]
    own = shape.kv_bytes(config.retention.tokens)
    assert own <= kept <= 1.1 * own


RETAINING = [each.name for each in presets() if "retention.tokens" in each.settings]
SMOLLM2 = {"layers": 30, "kv_heads": 3, "head_dim": 64, "element_bytes": 2}
LLAMA_8B = {"layers": 32, "kv_heads": 8, "head_dim": 128, "element_bytes": 2}
MASS_UNIT = 1024  # csrc/methods/retention/retained_tokens.h


@pytest.mark.parametrize("sizes", [SMOLLM2, LLAMA_8B], ids=["SmolLM2", "Llama 8B"])
@pytest.mark.parametrize("name", RETAINING)
def test_a_retained_token_more_takes_at_most_a_tenth_more_than_it_is(name, sizes):
    """Apart from what does not grow with them: queries of a window, sums, one page begun."""
    heads = 3 * sizes["kv_heads"] if sizes is SMOLLM2 else 32
    shape = ModelShape(heads=heads, **sizes)
    needs = {
        "retention.scoring_heads": tuple(heads * layer for layer in range(shape.layers)),
        "retention.layer_weights": (1.0,) * shape.layers,
    }
    said = {path: needs[path] for path in find(name).needs}
    config = SwapConfig.preset(name, said, shape=Shape(**sizes))
    tokens = config.retention.tokens
    kept, twice = (
        native_need(config.with_settings({"retention.tokens": n * tokens}), shape, 4352, 1)["kept"]
        for n in (1, 2)
    )
    own, state = shape.kv_bytes(tokens), 2 * kept - twice
    # Positions of three times as many tokens as layers have on average, and their order.
    most = 1.16 if name == "cake" else 1.1
    assert own <= twice - kept <= most * own
    policy = config.retention
    window = getattr(policy, "window_size", 0) * heads * (shape.head_dim * 2 + 4)
    apart = shape.kv_heads if config.selection.heads == "per_head" else 1
    sums = 4 * apart * (MASS_UNIT + config.selection.recent_tokens)
    page = shape.kv_bytes(config.selection.group_tokens)
    assert 0 <= state <= shape.layers * (window + sums) + 2 * page


@given(share=st.integers(2, 40))
def test_columns_may_stay(share):
    """Then groups alone are lowered, as many as fit."""
    config = SwapConfig(rank=24, groups_max=100, pages_max=100, summary_dtype="int8")

    def need(candidate: SwapConfig) -> dict[str, int]:
        return plain_need(candidate, WIDE, 4096, 1)

    request = Request(WIDE.kv_bytes(4096) // share, 4096, 1)
    try:
        chosen = fit_budget(request, WIDE, config, need, keeps_columns=True)
    except BudgetError:
        smallest = config.with_settings({"selection.top_k_groups": 8, "memory.pages_per_layer": 8})
        assert need(smallest)["total"] > request.kv_memory_bytes
        return
    assert chosen.rank == 24 and need(chosen)["total"] <= request.kv_memory_bytes
    if chosen.groups_max < 98:
        more = {"selection.top_k_groups": chosen.groups_max + 2}
        pages = {"memory.pages_per_layer": chosen.groups_max + 2}
        assert need(config.with_settings(more | pages))["total"] > request.kv_memory_bytes


def test_an_unknown_context_leaves_room_to_grow():
    assert FirstPass(1, 100).context == 1124 and FirstPass(1, 10_000).context == 15_000


def test_without_a_calibration_a_prediction_is_not_trusted():
    shape = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=16, element_bytes=4)
    settled = settle(None, shape, Budget(), lambda *_: {"total": 0})
    assert settled.look_ahead == SwapConfig().look_ahead == "verify"
    asked = settle(SwapConfig(look_ahead="trust"), shape, Budget(), lambda *_: {"total": 0})
    assert asked.look_ahead == "trust"
