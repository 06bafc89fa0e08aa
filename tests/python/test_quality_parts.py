"""The parts of the quality harness: choices, bytes, names, statistics, journal, and a short run."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from bench.quality import report
from bench.quality.budget import Bytes
from bench.quality.choosing import Frame
from bench.quality.document import Sample
from bench.quality.harness import REFERENCE, Harness, Setting
from bench.quality.journal import Journal
from bench.quality.methods import Resolver, parse
from bench.quality.others import Chance, Oracle, Recent, Snap
from bench.quality.plan import CORE, GRID, make_plan
from bench.quality.row_attention import attend_all, attend_chosen, column_table
from bench.quality.statistics import bootstrap, paired
from bench.quality.swap import MASSES, SCORES, Swap
from bench.quality.told import answer_rows, score_sample
from bench.quality.verdict import judge, sentences
from bench.quality.view import LayerPast, View
from kvswap_torch import SwapConfig
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, tiny_model

HEADS, KV_HEADS, HEAD_DIM, TOKENS, BATCH, ROWS = 4, 2, 8, 90, 2, 11
FRAME = Frame(group_tokens=4, groups_max=3, sink_tokens=6, tail_tokens=10)
TEXT = str(REFERENCE / "documents" / "python_logging.txt")

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


def make_view(seed: int = 0, predicted: bool = True) -> View:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, HEAD_DIM, generator=generator)

    query = 2 * draw(BATCH, HEADS, ROWS)
    past = LayerPast(
        draw(TOKENS, KV_HEADS), draw(TOKENS, KV_HEADS), draw(1, HEADS, 64), draw(1, HEADS, 40)
    )
    near = query + draw(BATCH, HEADS, ROWS) if predicted else None
    own = draw(BATCH, KV_HEADS, ROWS), draw(BATCH, KV_HEADS, ROWS)
    return View(0, query, near, *own, past, HEAD_DIM**-0.5)


def weights(view: View, sample: int, head: int, row: int) -> torch.Tensor:
    """One row's attention over all columns, from its definition."""
    kv_head = head // view.repeats
    keys = torch.cat([view.past.keys[:, kv_head], view.keys[sample, kv_head]])
    scores = keys @ view.query[sample, head, row] * view.scale
    scores[TOKENS + row + 1 :] = -torch.inf
    return scores.softmax(0)


def test_masses_and_attention_are_the_softmax_of_what_is_seen():
    view = make_view()
    mask = torch.rand(BATCH, KV_HEADS, ROWS, view.columns) < 0.3
    mask |= view.own()
    actual, everything = attend_chosen(view, mask), attend_all(view)
    masses = dict(view.masses(torch.arange(BATCH * ROWS)))
    for sample, head, row in np.ndindex(BATCH, HEADS, ROWS):
        expected = weights(view, sample, head, row)
        torch.testing.assert_close(masses[head][sample * ROWS + row], expected)
        kv_head = head // view.repeats
        values = torch.cat([view.past.values[:, kv_head], view.values[sample, kv_head]])
        torch.testing.assert_close(everything[sample, head, row], expected @ values)
        kept = expected * mask[sample, kv_head, row]
        torch.testing.assert_close(actual[sample, head, row], kept / kept.sum() @ values)


def test_column_table_lists_what_is_set():
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    table, seen = column_table(mask)
    assert [row[kept].tolist() for row, kept in zip(table, seen, strict=True)] == [[0, 2, 3], [1]]


def test_oracles_hold_most_and_chance_least():
    view = make_view()
    rows = torch.arange(BATCH * ROWS)
    mass = sum(mass for _, mass in view.masses(rows)) / HEADS
    mass = mass.unflatten(0, (BATCH, 1, ROWS))

    def held(method) -> float:
        return (mass * method.choose(view)).sum(-1).mean().item()

    pairs = [(torch.eye(KV_HEADS * HEAD_DIM),) * 2]
    swap = Swap(FRAME, pairs, (16,), true_query=frozenset([0]))
    tokens = dataclasses.replace(FRAME, group_tokens=1, groups_max=12)
    best, chosen, chance = held(Oracle(FRAME)), held(swap), held(Chance(FRAME))
    assert held(Oracle(tokens)) > best >= chosen > chance
    # The predicted query is another one, and is what is used unless the layer is said not to.
    guessed = held(dataclasses.replace(swap, true_query=frozenset()))
    assert guessed != chosen and guessed < best


def test_what_is_attended_is_sinks_groups_and_tail():
    view = make_view()
    mask = Chance(FRAME).choose(view)[:, 0]
    sealed = ((view.positions() - 10) // 4 * 4).tolist()
    for sample, row in np.ndindex(BATCH, ROWS):
        columns = mask[sample, row].nonzero().flatten().tolist()
        assert columns[:8] == list(range(8))  # 6 sinks, in whole groups
        tail = list(range(sealed[row], TOKENS + row + 1))
        assert columns[-len(tail) :] == tail
        assert len(columns) == 8 + 3 * 4 + len(tail)


@pytest.mark.parametrize("score", [score for score in SCORES if score not in MASSES])
def test_every_score_at_full_rank_is_the_plain_one(score):
    view = make_view(predicted=False)
    pairs = [(torch.eye(KV_HEADS * HEAD_DIM),) * 2]
    actual = Swap(FRAME, pairs, (16,), score=score).token_scores(view)
    sample, row = 1, 4
    products = torch.stack(
        [
            torch.cat([view.past.keys[:, h // 2], view.keys[sample, h // 2]])
            @ view.query[sample, h, row]
            for h in range(HEADS)
        ]
    )
    expected = {
        "sum": products.sum(0)[None],
        "max": products.amax(0)[None] * view.scale,
    }
    if score == "softmax":
        choosable = slice(8, (TOKENS + row - 10) // 4 * 4)
        part = (products[:, choosable] * view.scale).softmax(1).sum(0)
        torch.testing.assert_close(actual[sample, 0, row, choosable], part)
    else:
        torch.testing.assert_close(actual[sample, :, row], expected[score])


@pytest.mark.parametrize("score", ["sum", "mass"])
def test_each_head_chooses_as_a_model_with_that_head_alone(score):
    view = make_view()
    width = KV_HEADS * HEAD_DIM
    pairs = [(torch.randn(width, 5), torch.randn(width, 5))]
    each = Swap(FRAME, pairs, (5,), score=score, heads="each").choose(view)
    assert each.shape[1] == KV_HEADS
    for head in range(KV_HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        own = [tuple(side[rows] for side in pairs[0])]
        alone = View(
            view.layer,
            view.query[:, 2 * head : 2 * head + 2],
            None if view.predicted is None else view.predicted[:, 2 * head : 2 * head + 2],
            view.keys[:, head : head + 1],
            view.values[:, head : head + 1],
            LayerPast(
                *(t[:, head : head + 1] for t in (view.past.keys, view.past.values)),
                *(
                    t[:, 2 * head : 2 * head + 2]
                    for t in (view.past.first_query, view.past.last_query)
                ),
            ),
            view.scale,
        )
        assert torch.equal(each[:, head], Swap(FRAME, own, (5,), score=score).choose(alone)[:, 0])
    assert not torch.equal(each[:, 0], each[:, 1])


@pytest.mark.parametrize("score", MASSES)
def test_at_full_rank_a_groups_mass_is_what_attention_gives_it(score):
    view = make_view(predicted=False)
    swap = Swap(FRAME, [(torch.eye(KV_HEADS * HEAD_DIM),) * 2], (16,), score=score)
    sample, row = 1, 4
    products = torch.stack(
        [
            torch.cat([view.past.keys[:, h // 2], view.keys[sample, h // 2]])
            @ view.query[sample, h, row]
            for h in range(HEADS)
        ]
    )
    choosable = slice(8, (TOKENS + row - 10) // 4 * 4)
    seen = slice(0, TOKENS + row + 1) if score.endswith("kept") else choosable
    mass = torch.zeros_like(products)
    mass[:, seen] = (products[:, seen] * view.scale).softmax(1)
    of_groups = mass[:, choosable].unflatten(1, (-1, 4)).sum(2)
    expected = of_groups.amax(0) if score.startswith("max") else of_groups.sum(0)
    actual = swap._group_masses(view)[sample, 0, row, 2 : choosable.stop // 4]
    torch.testing.assert_close(actual, expected)


def test_eviction_keeps_its_budget_and_what_was_looked_at():
    view = make_view()
    recent = Recent(kept=20, sink_tokens=4).choose(view)
    assert recent.sum(-1).unique().tolist() == [20]
    kept = Snap(40).choose(view)
    assert kept[..., :TOKENS].sum(-1).unique().tolist() == [40]
    assert kept[..., TOKENS - 32 : TOKENS].all()
    assert not torch.equal(kept[:, 0], kept[:, 1])  # each KV head its own


def test_who_is_kept_was_paid_most_with_four_neighbours():
    """SnapKV's published rule, window 32: those before it by an average of 5, and the window."""
    view, before = make_view(), TOKENS - 32
    kept = Snap(40).choose(view)[0, :, 0, :TOKENS]
    for head, own in enumerate(view.past.last_query[0, :, -32:].double().split(2)):
        products = own @ view.past.keys[:, head].double().T * view.scale
        later = torch.arange(TOKENS) > torch.arange(before, TOKENS)[:, None]
        paid = products.masked_fill(later, -torch.inf).softmax(-1)[..., :before].sum((0, 1))
        averages = torch.stack([paid[max(0, t - 2) : t + 3].sum() / 5 for t in range(before)])
        best = averages.topk(40 - 32).indices.tolist()
        assert torch.where(kept[head])[0].tolist() == sorted([*best, *range(before, TOKENS)])
    newest = view.past.last_query[:, :, -20:]
    past = LayerPast(view.past.keys[:20], view.past.values[:20], newest, newest)
    assert Snap(40).choose(dataclasses.replace(view, past=past))[..., :20].all()


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_bytes_are_counted_the_same_way_for_all():
    model = tiny_model("llama")
    config = SwapConfig(rank=16, look_ahead=False)
    size = Bytes(model, model_parts(model).shape, 4096)
    resolver = Resolver(config, size, _NoProjections())
    full, swap, recent, snap = map(resolver.resolve, ("full", "kvswap", "recent", "snapkv"))
    assert full.memory_bytes == 4096 * size.shape.kv_bytes(1)
    assert swap.memory_bytes == size.need(dataclasses.replace(config, rank=32))["total"]
    token = size.shape.kv_bytes(1)
    for evicting in (recent, snap):
        assert resolver.budget - token < evicting.memory_bytes <= resolver.budget
    shared = resolver.resolve("snapkv:memory=1/4").memory_bytes
    assert full.memory_bytes // 4 - token < shared <= full.memory_bytes // 4
    with pytest.raises(BudgetError, match="kv_memory_bytes: must be at least"):
        resolver.resolve("kvswap:memory=1/4000")
    larger = resolver.resolve("kvswap:group=16")
    assert larger.frame.groups_max * 16 == 400 and larger.pages == 50


class _NoProjections:
    rotary = None

    def pairs(self, kind, ranks):
        return None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kvswop", "methods: must be of a family full, "),
        ("kvswap:depth=3", "methods: settings of kvswap must be SETTING=VALUE"),
        ("full:rank=3", "methods: settings of full must be SETTING=VALUE with one of none"),
    ],
)
def test_unknown_names_are_refused(name, told):
    with pytest.raises(ValueError, match=told):
        parse(name)


def test_the_plan_runs_the_grid_on_short_documents_only():
    short, long = make_plan([16384, 4096], [2, 5], ["core", "grid"], 8192, layers=6)
    assert (short.length, short.documents) == (4096, 5)
    assert set(GRID) < set(short.methods) and not set(GRID) & set(long.methods)
    assert set(CORE) <= set(long.methods) and long.methods[0] == "full"
    with pytest.raises(ValueError, match="one positive count of documents"):
        make_plan([1024], [1, 2], [], 0, 6)


def test_the_bootstrap_draws_documents_and_pairs_samples():
    mean, low, high = bootstrap([[1, 1, 1], [0], []])
    assert (mean, low, high) == (0.75, 0.0, 1.0)
    assert bootstrap([[], []]) is None
    # Samples that differ alike everywhere leave no doubt, whatever they are.
    assert paired([[3, 9], [5]], [[2, 8], [4]]) == (1.0, 1.0, 1.0)
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        means = generator.normal(0, 1, 30)
        interval = bootstrap([(m + generator.normal(0, 1, 4)).tolist() for m in means])
        covered += interval[1] <= 0 <= interval[2]
    assert 0.88 < covered / 200 < 0.99
    with pytest.raises(ValueError, match="same samples"):
        paired([[1.0]], [[1.0, 2.0]])


def test_an_answer_is_exact_when_each_token_is_the_best_guess():
    sample = Sample("needle", torch.tensor([5, 6, 1, 2, 7, 3]), ((2, 4), (5, 6)), 0.5)
    logits = torch.zeros(4, 9)  # from row 1 on: rows 1..4 predict tokens 2..5
    logits[0, 1] = logits[1, 2] = logits[2, 7] = logits[3, 8] = 5.0
    rows = answer_rows(sample, logits, 1)
    assert rows.argmax(-1).tolist() == [1, 2, 8]
    told = torch.zeros(3, 9)
    told[0, 1] = told[1, 2] = told[2, 4] = 5.0
    scored = score_sample(sample, rows, told.log_softmax(-1))
    assert [answer["exact"] for answer in scored["answers"]] == [True, False]
    assert [answer["right"] for answer in scored["answers"]] == [2, 0]
    assert [answer["agree"] for answer in scored["answers"]] == [2, 0]
    expected = torch.nn.functional.cross_entropy(logits[3:], torch.tensor([3])).item()
    assert scored["answers"][1]["loss"] == pytest.approx(expected, abs=1e-4)
    both = (
        torch.distributions.Categorical(logits=told[2]),
        torch.distributions.Categorical(logits=rows[2]),
    )
    divergence = torch.distributions.kl_divergence(*both).item()
    assert [answer["kl"] for answer in scored["answers"]] == [0.0, pytest.approx(divergence, 1e-4)]


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_a_short_run_is_resumed_and_summarised(tmp_path):
    """The fast mode: one document of 1K, a few methods; nothing is measured twice."""
    setting = Setting(REFERENCE, ("needle", "language"), TEXT, 3, dtype=torch.float32)
    names = ["kvswap", "kvswap:memory=1/90", "oracle-groups", "recent:memory=1/4"]
    plan = make_plan([1024], [1], names[:1], 8192, 6)
    harness = Harness(setting, tmp_path)
    harness.run(plan)
    before = harness.journal.path.read_text()
    with harness.journal.path.open("a") as file:
        file.write('{"length": 1024, "docum')  # a run that was killed
    harness = Harness(setting, tmp_path)
    plan = make_plan([1024], [1], names, 8192, 6)
    assert harness.missing(plan) == 3
    harness.run(plan)
    assert harness.missing(plan) == 0
    assert harness.journal.path.read_text().startswith(before)
    lines = Journal(harness.journal.path).lines()
    assert sorted(line["method"] for line in lines) == sorted(["full", *names])

    part = report.summarise(harness)["lengths"]["1024"]
    assert list(part["impossible"]) == ["kvswap:memory=1/90"]
    full, swap, oracle = (part["methods"][name] for name in ("full", "kvswap", "oracle-groups"))
    assert full["tasks"]["language"]["loss_difference"] == (0.0, 0.0, 0.0)
    assert {recall for recall, _, _ in full["layers"]["recall"]} == {1.0}
    assert 0 < swap["bytes_read_per_token"] < swap["bytes_chosen_per_token"]
    assert swap["bytes_chosen_per_token"] == pytest.approx(6 * 100 * 4096 * 2, rel=0.01)  # fp32
    held = [layer[0] for layer in swap["layers"]["recall"]]
    assert all(0 < a <= b + 1e-3 for a, b in zip(held, swap["layers"]["best"], strict=True))
    # Another choice leads to another input of the next layer, so its best choice is another too.
    assert oracle["layers"]["overlap"] == pytest.approx([1.0] * 6)
    assert set(part["able"]) | set(part["left_out"]) == {"needle"}


def test_figures_are_drawn_from_a_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    path = report.write("made_up", {"lengths": {"4096": made_up_length()}})
    assert json.loads(path.read_text())["lengths"]["4096"]["documents"] == 2
    drawn = sorted(file.stem for file in tmp_path.glob("*.png"))
    assert drawn == [
        f"made_up_{figure}"
        for figure in ("accuracy_by_budget", "accuracy_by_depth", "recall_by_bytes",
                       "recall_by_layer")
    ]  # fmt: skip


def test_the_verdict_names_gaps_and_what_closes_them():
    def method(exact: float, memory: float) -> dict:
        tasks = {
            task: {"exact_difference": (exact - 1, exact - 1.1, exact - 0.985)}
            for task in ("needles", "json")
        }
        heads = [[0.9, 0.4], [0.7, 0.8]]
        layers = {"recall_of_head": {"json": heads}}
        return {"memory_share": memory, "selected_tokens": 400, "tasks": tasks, "layers": layers}

    methods = {
        "full": method(1.0, 1.0),
        "kvswap": method(0.8, 0.1),
        "kvswap:groups=200": method(0.995, 0.15),
        "kvswap:rank=64": method(1.0, 0.3),
        "kvswap:exact=1": method(0.97, 0.1),
    }
    verdict = judge({"4096": {"methods": methods}})
    found = verdict["4096"]["kvswap"]
    assert found["within_a_point"] is False and list(found["gaps"]) == ["json"]
    gap = found["gaps"]["json"]
    assert gap["least_recall"][0] == (0, 1, 0.4)
    assert gap["closed_by"] == ("kvswap:groups=200", 0.15)
    assert gap["with_exact_layer"] == {"1": pytest.approx(-0.03)}
    (line,) = sentences(verdict)
    assert "NOT within" in line and "-3 with layer 1" in line and "at 1/6.7" in line


def made_up_length() -> dict:
    names = ["full", "kvswap", "kvswap:rank=8", "kvswap:groups=50", "recent", "recent:memory=1/4"]
    return {
        "documents": 2,
        "able": {"needle": 1.0},
        "left_out": {},
        "methods": {name: made_up_method(i) for i, name in enumerate(names)},
    }


def made_up_method(number: int) -> dict:
    exact = (1.0 - 0.1 * number, 0.8 - 0.1 * number, 1.0)
    return {
        "memory_share": 1.0 / (1 + number),
        "bytes_chosen_per_token": 8192 * number,
        "bytes_read_per_token": 4096 * number,
        "tasks": {task: {"exact": exact} for task in ("needles", "all")},
        "layers": {"recall": [(0.8, 0.7, 0.9)] * 3, "best": [0.9] * 3},
        "depths": [(0.1, 1.0), (0.9, 0.0)],
    }
