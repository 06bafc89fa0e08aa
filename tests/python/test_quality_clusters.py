"""Clusters in the quality harness: their choice, their bytes, what they read, how they drift."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.clusters_table import cluster_rows, drift_rows
from bench.quality import report
from bench.quality.budget import Bytes
from bench.quality.choosing import Frame
from bench.quality.cluster_bytes import cluster_pages
from bench.quality.cluster_updates import UPDATES, clusters_of
from bench.quality.clusters import ClusterMethod, ClusterSettings, Extents
from bench.quality.co_read import chained
from bench.quality.disk import DEVICES, Device, DiskUse, Want, replay
from bench.quality.drift import by_thousand, drift, means
from bench.quality.harness import REFERENCE, Harness, Setting
from bench.quality.methods import Resolver, parse
from bench.quality.plan import make_plan
from bench.quality.view import LayerPast, View
from kvswap_torch import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.methods.clusters import (
    LOCAL_CLUSTERS,
    PENDING,
    SINK,
    TAIL,
    ClusterOptions,
    Clusters,
)
from kvswap_torch.methods.k_means import squares
from kvswap_torch.sizing import ModelShape
from kvswap_torch.tuning.traffic import Merging, ReuseBuffer
from tests.python.tiny_models import has_native, prompt, tiny_model

HEADS, KV_HEADS, HEAD_DIM, TOKENS, BATCH, ROWS = 4, 2, 8, 600, 2, 40
FRAME = Frame(group_tokens=4, groups_max=0, sink_tokens=6, tail_tokens=10)
OPTIONS = ClusterOptions(16, 32, 1.25, 4, sink_tokens=8)
ALL = 10_000
ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


def make_view(seed: int = 0) -> View:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, HEAD_DIM, generator=generator)

    past = LayerPast(
        draw(TOKENS, KV_HEADS), draw(TOKENS, KV_HEADS), draw(1, HEADS, 64), draw(1, HEADS, 40)
    )
    # Later keys are elsewhere: clusters have to split.
    own = 3 + draw(BATCH, KV_HEADS, ROWS), draw(BATCH, KV_HEADS, ROWS)
    return View(0, 2 * draw(BATCH, HEADS, ROWS), None, *own, past, HEAD_DIM**-0.5)


def method(heads="all", update="adaptive", score="sum", tokens=100, pages=ALL) -> ClusterMethod:
    return ClusterMethod(FRAME, ClusterSettings(OPTIONS, heads, update, score, tokens, pages, 7))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("heads", ["all", "each"])
def test_with_a_budget_for_all_everything_is_attended(heads, update):
    view = make_view()
    mask = method(heads, update, tokens=ALL).choose(view) & view.causal()
    assert mask.shape[1] == (KV_HEADS if heads == "each" else 1)
    assert (mask == view.causal()).all()


def test_a_step_attends_what_the_rules_say():
    """Against a loop from the definitions: best centroids first, then tokens leave the tail."""
    view = make_view()
    cluster = method(tokens=100)
    mask = cluster.choose(view)
    for sample in range(BATCH):
        keys = torch.cat([view.past.keys.flatten(1), view.keys[sample].transpose(0, 1).flatten(1)])
        row = Clusters(keys.shape[1], TOKENS + 256, OPTIONS)
        row.enter_prompt(keys, (TOKENS - 10) // 4 * 4)
        for step in range(ROWS):
            summed = view.query[sample, :, step].unflatten(0, (KV_HEADS, 2)).sum(1).flatten()
            worth = [float(row.centroid[c] @ summed) for c in range(row.count)]
            chosen: list[int] = []
            for number in sorted(range(row.count), key=lambda c: (-worth[c], c)):
                if sum(int(row.size[c]) for c in (*chosen, number)) > 100:
                    break
                chosen.append(number)
            place = row.place[: view.columns].tolist()
            expected = [at in (SINK, PENDING, TAIL) or at in chosen for at in place]
            assert mask[sample, 0, step].tolist() == expected
            tokens = sum(at in chosen for at in place)
            assert cluster.taken.tokens[sample][0][step] == tokens <= 100
            row.enter(keys, (TOKENS + step + 1 - 10) // 4 * 4, set(chosen))
        assert row.splits > 0  # which tokens after the prompt have brought about


def test_each_head_has_its_own_clusters():
    view = make_view()
    each = method("each").choose(view)
    for head in range(KV_HEADS):
        alone = method("all").choose(view.of_head(head))
        assert torch.equal(each[:, head], alone[:, 0])
    assert not torch.equal(each[:, 0], each[:, 1])


def test_pages_bound_a_choice_too():
    cluster = method(tokens=ALL, pages=6)
    cluster.choose(make_view())
    wants = [want for sample in cluster.taken.wants for want in sample[0]]
    assert max(len(want.names) for want in wants) <= 6
    assert all((np.diff(want.names) > 0).all() for want in wants)
    assert all(len(set(want.places)) == len(want.names) for want in wants)


def test_of_a_cluster_larger_than_the_budget_the_newest_tokens_are_attended():
    view = make_view()
    mask = method(update="static", tokens=5).choose(view) & view.causal()
    counts = mask.sum(-1)[:, 0]
    always = (view.positions() + 1) - (view.positions() - 10) // 4 * 4 + 8
    assert (counts - always <= 5).all() and (counts - always > 0).all()


@given(update=st.sampled_from(["static", "local"]), seed=st.integers(0, 999), odd=st.booleans())
@settings(max_examples=20, deadline=None)
def test_other_updates_keep_every_token_in_one_place(update, seed, odd):
    keys = torch.randn(700, 4, generator=torch.Generator().manual_seed(seed))
    if odd:
        keys[torch.randint(700, (9,), generator=torch.Generator().manual_seed(seed))] = torch.nan
    row = clusters_of(update, 4, 700, OPTIONS)
    row.enter_prompt(keys, 400)
    for end in range(404, 701, 4):
        assert row.enter(keys, end, ()) == []
        place = row.place[8:end]
        assert (row.place[end:] == TAIL).all() and (row.place[:8] == SINK).all()
        assert ((place >= 0) & (place < row.count) | (place == PENDING)).all()
        counts = torch.bincount(place[place >= 0], minlength=row.count)
        assert torch.equal(counts, row.size[: row.count])
        assert row.pending == int((place == PENDING).sum()) < row.options.waiting_max
    assert row.centroid.isfinite().all()


def test_static_clusters_keep_their_centroids_and_local_ones_their_tokens():
    keys = torch.randn(700, 4, generator=torch.Generator().manual_seed(1))
    for update in ("static", "local"):
        row = clusters_of(update, 4, 700, OPTIONS)
        row.enter_prompt(keys, 500)
        count, before, place = row.count, row.centroid.clone(), row.place.clone()
        row.enter(keys, 700, ())
        assert torch.equal(row.centroid[:count], before[:count])
        assert torch.equal(row.place[:500], place[:500])
        if update == "static":
            apart = squares(before[:count] - keys[600])
            assert row.count == count and int(row.place[600]) == int(apart.argmin())
        else:
            assert row.count == count + LOCAL_CLUSTERS and (row.place[500:] >= count).all()


def test_pages_of_a_cluster_are_neighbours_and_move_when_it_outgrows_them():
    row = Clusters(1, 100, ClusterOptions(10, 20))
    row.count, row.size[:3] = 3, torch.tensor([7, 8, 20])
    extents = Extents(7)
    extents.lay(row, [0, 1, 2])
    assert extents.want(row, [2, 1, 0], 99).places.tolist() == [0, 2, 3, 5, 6, 7]
    other = extents.copy()
    row.size[0] = 15
    assert extents.want(row, [0], 99).places.tolist() == [9, 10, 11]
    assert extents.want(row, [2], 2).places.tolist() == [6, 7]  # the newest pages
    row.size[0] = 14
    assert other.want(row, [0], 99).places.tolist() == [0, 1]  # one was free behind it


@given(st.lists(st.sets(st.integers(0, 9)), max_size=12))
@settings(max_examples=50, deadline=None)
def test_clusters_that_are_chosen_together_become_neighbours(choices):
    """Each number once; the pair that most steps chose, and that others may follow, touches."""
    order = chained([sorted(step) for step in choices], 10)
    assert sorted(order) == list(range(10))
    at = {cluster: place for place, cluster in enumerate(order)}
    times = {
        (a, b): sum({a, b} <= step for step in choices) for a in range(10) for b in range(a + 1, 10)
    }
    first = min(times, key=lambda pair: (-times[pair], pair))
    if times[first] >= 2:
        assert abs(at[first[0]] - at[first[1]]) == 1
    else:
        assert order == list(range(10))


def test_an_order_changes_where_clusters_stand_and_nothing_else():
    taken = []
    for order in ("made", "co_read"):
        view = make_view()
        cluster = ClusterMethod(FRAME, replace(method().settings, order=order))
        mask = cluster.choose(view)
        wants = [want for sample in cluster.taken.wants for want in sample[0]]
        taken.append((mask, [want.names.tolist() for want in wants], wants))
    (made, names, here), (read, same_names, there) = taken
    assert torch.equal(made, read) and names == same_names
    assert any(a.places.tolist() != b.places.tolist() for a, b in zip(here, there, strict=True))


def test_a_replay_keeps_what_the_reuse_buffer_keeps():
    generator = np.random.default_rng(0)
    steps = [np.sort(generator.permutation(40)[:10]) for _ in range(20)]
    wants = [Want(step, 2 * step) for step in steps]
    reads, share = replay(wants, 15, "fifo", Merging(4096, 0, 4096))
    buffer = ReuseBuffer(15, "fifo")
    loads = [len(buffer.plan(step)) for step in steps]
    assert share == pytest.approx(1 - sum(loads[1:]) / 190)
    assert len(reads) == 19 and {size for each in reads for size in each} == {4096}
    assert 1 - sum(map(len, reads)) / 190 == pytest.approx(share)


def test_devices_are_those_of_the_modelled_reader():
    text = (ROOT / "csrc/io/modelled_reader.cpp").read_text(encoding="utf-8")
    for name, device in DEVICES.items():
        (found,) = re.findall(rf'{{"{name}", (\S+), (\S+), (\d+)}}', text)
        assert (device.latency_s, device.bytes_per_s, device.depth) == tuple(map(float, found))


def test_a_device_serves_so_many_reads_at_once_over_one_bus():
    device = Device(1.0, 100.0, 2)
    assert device.seconds([]) == 0.0
    assert device.seconds([50]) == 1.5
    assert device.seconds([50, 50]) == 2.0
    assert device.seconds([50, 50, 50]) == 3.0  # the first is done at 1.5, the third at 2.5 + 0.5


def test_a_token_is_all_layers_one_after_another():
    use = DiskUse(layers=3)
    assert use.as_dict() is None
    use.add([[[4096], [4096, 8192]], [[], [4096]]])  # two rows, two steps
    told = use.as_dict()
    assert (told["requests"], told["bytes"]) == (6.0, 30720)
    emmc = DEVICES["emmc"]
    expected = 1.5 * (emmc.seconds([4096]) + emmc.seconds([4096, 8192, 4096]))
    assert told["ms"]["emmc"] == pytest.approx(1e3 * expected, abs=1e-3)


def test_a_page_holds_what_fits():
    shape = ModelShape(layers=6, heads=8, kv_heads=4, head_dim=64, element_bytes=2)
    each, together = cluster_pages(shape, "each"), cluster_pages(shape, "all")
    assert (each.page_tokens, each.record_bytes, each.rows) == (15, 4096, 4)
    assert (together.page_tokens, together.record_bytes, together.rows) == (15, 16384, 1)
    wide = ModelShape(layers=1, heads=1, kv_heads=1, head_dim=512, element_bytes=4)
    with pytest.raises(ValueError, match="must be filled by half, holds 0 tokens"):
        cluster_pages(wide, "each")


class _NoProjections:
    def pairs(self, kind, ranks):
        return None


@needs_native
def test_names_become_settings_within_their_memory():
    model = tiny_model("llama")
    size = Bytes(model, model_parts(model).shape, 4096)
    resolver = Resolver(SwapConfig(look_ahead=False), size, _NoProjections())
    plain = resolver.resolve("clusters")
    made = plain.method.settings
    assert (made.options.cluster_tokens, made.heads, made.score) == (32, "all", "sum")
    assert (made.tokens_max, made.options.sink_tokens) == (400, 4)
    named = "clusters:tokens=16,heads=each,update=local,score=mass,attend=200,sinks=9,tail=50"
    each = resolver.resolve(named)
    made = each.method.settings
    assert (made.options.cluster_tokens, made.heads, made.update) == (16, "each", "local")
    assert (made.score, made.tokens_max, made.options.sink_tokens) == ("mass", 200, 12)
    assert each.method.frame.tail_tokens == 50
    paged = resolver.resolve("clusters:groups=9").method.settings
    assert (paged.pages_max, paged.tokens_max) == (9, 4096)
    small = resolver.resolve("clusters:memory=1/2")
    page = small.record_bytes * size.shape.layers
    assert size.full / 2 - page < small.memory_bytes <= size.full / 2
    assert small.pages < plain.pages
    with pytest.raises(BudgetError, match="kv_memory_bytes: must be at least"):
        resolver.resolve("clusters:memory=1/400")
    for name, told in [("heads=two", "heads: must be one of all, each, got 'two'"),
                       ("update=never", "update: must be one of adaptive, static, local"),
                       ("score=mean", "score: must be one of sum, max, mass"),
                       ("tokens=few", "tokens: must be a whole number")]:  # fmt: skip
        with pytest.raises(ValueError, match=told):
            resolver.resolve(f"clusters:{name}")
    with pytest.raises(ValueError, match="settings of clusters must be SETTING=VALUE"):
        parse("clusters:rank=3")


@needs_native
def test_a_short_run_tells_what_clusters_read(tmp_path):
    text = str(REFERENCE / "documents" / "python_logging.txt")
    harness = Harness(Setting(REFERENCE, ("needle",), text, 3, dtype=torch.float32), tmp_path)
    names = ["kvswap", "clusters:attend=200", "clusters:attend=200,heads=each", "snapkv"]
    harness.run(make_plan([1024], [1], names, 8192, 6))
    methods = report.summarise(harness)["lengths"]["1024"]["methods"]
    for name in names[:3]:
        told = methods[name]
        assert told["disk"]["requests"] > 0 and set(told["disk"]["ms"]) >= {"ufs", "emmc"}
        assert 0 < told["disk"]["bytes"] < 2 * told["bytes_chosen_per_token"]
    assert methods["kvswap"]["tokens_per_step"] == 400
    assert methods["snapkv"]["disk"] is None
    header, _, full, *rows = cluster_rows([report.summarise(harness)])
    assert len(rows) == 3 and "| full |" in full
    assert {row.count("|") for row in (full, *rows)} == {header.count("|")}
    for name in names[1:3]:
        told = methods[name]
        assert 150 < told["tokens_per_step"] <= 200 and told["clusters"] > 20
        assert 0 < told["bytes_read_per_token"] <= told["bytes_chosen_per_token"]
        assert all(0.3 < recall < 1 for recall, _, _ in told["layers"]["recall"])
        assert told["ranks"] is None


@pytest.mark.parametrize("heads", ["all", "each"])
def test_a_drift_run_takes_in_all_that_follows(heads):
    model = tiny_model("llama")
    ids = prompt(1, 760)["input_ids"][0]
    frame = Frame(4, 0, 4, 12)
    options = ClusterOptions(8, 16, sink_tokens=4)
    found = drift(model, ids, 700, ClusterSettings(options, heads, "", "sum", 60, ALL, 7), frame)
    shape = model_parts(model).shape
    rows = shape.layers * (shape.kv_heads if heads == "each" else 1)
    for update, told in found.items():
        assert len(told) == rows
        for row in told:
            assert row["clusters"] * row["tokens_of_cluster"] == pytest.approx(
                (760 - 12) // 4 * 4 - 4 - row["pending"], rel=0.01
            )
            assert [position for position, _ in row["recall"]] == [700, 732]
            assert all(0 < recall <= 1 for _, recall in row["recall"])
        assert means(told)["variance"] > 0 and update in UPDATES
    pairs = [pair for row in found["adaptive"] for pair in row["recall"]]
    ((first, mean),) = by_thousand(found["adaptive"])
    assert first == 0 and mean == pytest.approx(sum(r for _, r in pairs) / len(pairs), abs=1e-4)
    asked = {"heads": heads, "score": "sum"}
    header, _, *lines = drift_rows(
        [{"asked": asked, "mean": {update: means(told) for update, told in found.items()}}]
    )
    assert {line.count("|") for line in lines} == {header.count("|")} and len(lines) == 3
    # All three begin with the same clusters.
    starts = [[row["recall"][0] for row in told] for told in found.values()]
    assert starts[0] == starts[1] == starts[2]
