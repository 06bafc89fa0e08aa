"""The parts of the quality harness: names, plan, statistics, journal, and a short run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from bench import machine
from bench.quality import report
from bench.quality.__main__ import main as quality_main
from bench.quality.cost import cost_of, first_cells, seconds_of
from bench.quality.document import Sample
from bench.quality.harness import REFERENCE, Harness, Setting
from bench.quality.methods import parse, product_settings
from bench.quality.plan import DEFAULTS, make_plan
from bench.quality.product import Product
from bench.quality.told import answer_rows, score_sample
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.compare.journal import Journal
from kvswap_torch.compare.statistics import bootstrap, paired
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import model_parts
from tests.python.tiny_models import has_native, tiny_model

TEXT = str(REFERENCE / "documents" / "python_logging.txt")
needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


@needs_native
def test_a_share_of_the_memory_is_of_the_full_cache():
    model = tiny_model("llama")
    parts = model_parts(model)
    size = Bytes(parts, 4096)
    assert size.full == 4096 * parts.shape.kv_bytes(1)
    product = Product.named("product:memory=1/4", {"memory": "1/4"}, size)
    assert product.budget_bytes == size.full // 4 and product.config is None
    with pytest.raises(ValueError, match=r"memory: .* above 0, at most 1, got '2'"):
        size.share("2")
    with pytest.raises(ValueError, match=r"memory: .* such as 1/13, got 'much'"):
        size.share("much")
    with pytest.raises(ValueError, match="question: must be after or inside, got 'before'"):
        Product.named("product", {"question": "before"}, size)
    with pytest.raises(BudgetError, match="kv_memory_bytes: must be at least"):
        Product.named("quest", {"preset": "quest", "memory": "1/4000"}, size)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kvswop", "methods: must be of a family full, product, .*got 'kvswop'"),
        ("product:depth=3", "methods: settings of product must be SETTING=VALUE"),
        ("full:rank=3", "methods: settings of full must be SETTING=VALUE with one of none"),
        ("quest:memory", "methods: settings of quest must be SETTING=VALUE"),
    ],
)
def test_unknown_names_are_refused(name, told):
    with pytest.raises(ValueError, match=told):
        parse(name)


def test_a_preset_is_a_family_of_its_own():
    assert product_settings("quest:memory=1/8") == {"preset": "quest", "memory": "1/8"}
    assert product_settings("product:memory=1/8") == {"memory": "1/8"}


def test_the_plan_has_the_full_cache_first_and_short_documents_before_long_ones():
    short, long = make_plan([16384, 4096], [2, 5], ["defaults", "quest:memory=1/4", "defaults"])
    assert (short.length, short.documents) == (4096, 5)
    assert short.methods == long.methods == ("full", *DEFAULTS, "quest:memory=1/4")
    with pytest.raises(ValueError, match="one positive count of documents"):
        make_plan([1024], [1, 2], [])


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


@needs_native
def test_a_short_run_is_resumed_and_summarised(tmp_path, monkeypatch):
    """The fast mode: one document of 1K, a few methods; nothing is measured twice."""
    setting = Setting(REFERENCE, ("needle", "language"), TEXT, 3, dtype=torch.float32)
    names = ["product:memory=1/2", "product:memory=1/90", "snapkv:memory=1/2"]
    harness = Harness(setting, tmp_path)
    harness.run(make_plan([1024], [1], names[:1]))
    before = harness.journal.path.read_text()
    with harness.journal.path.open("a") as file:
        file.write('{"length": 1024, "docum')  # a run that was killed
    harness = Harness(setting, tmp_path)
    plan = make_plan([1024], [1], names)
    assert harness.missing(plan) == 2
    harness.run(plan)
    assert harness.missing(plan) == 0
    assert harness.journal.path.read_text().startswith(before)
    lines = Journal(harness.journal.path).lines()
    assert sorted(line["method"] for line in lines) == sorted(["full", *names])

    summary = report.summarise(harness)
    part = summary["lengths"]["1024"]
    assert list(part["impossible"]) == ["product:memory=1/90"]
    full, ours, evicting = (part["methods"][name] for name in ("full", names[0], names[2]))
    assert full["tasks"]["language"]["loss_difference"] == (0.0, 0.0, 0.0)
    assert full["tasks"]["asked"]["kept"] == (1.0, 1.0, 1.0) and full["memory_share"] == 1.0
    assert ours["bytes_read_per_token"] > 0 and 0 < ours["memory_share"] <= 0.5
    assert evicting["bytes_read_per_token"] == 0
    assert set(part["able"]) | set(part["left_out"]) == {"needle"}
    assert {depth > 0 for depth, _ in full["depths"]} == {True}
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert json.loads(report.write("made_up", summary).read_text())["model"] == "reference_model"


def journal_of(path, *lines):
    journal = Journal(path)
    for length, document, method, seconds in lines:
        journal.add({"length": length, "document": document, "method": method} | seconds)
    return journal


def test_the_cost_is_of_what_is_missing_by_the_seconds_of_what_is_there(tmp_path):
    plan = make_plan([1000, 2000], [2], ["snapkv:memory=1/2", "h2o:memory=1/2"])
    nothing = cost_of(plan, Journal(tmp_path / "none.jsonl"))
    assert (nothing.cells, nothing.left, nothing.documents) == (12, 12, 4)
    assert nothing.seconds is None and "known after the first" in nothing.line()
    wall = {"seconds": 10.0, "cpu_seconds": 19.0}
    begun = [(1000, 0, "full", wall), (1000, 0, "snapkv:memory=1/2", {"cpu_seconds": 30.0})]
    half = cost_of(plan, journal_of(tmp_path / "half.jsonl", *begun))
    # 1,000 tokens: h2o as snapkv, after the full cache; a whole document. Twice as much for 2,000.
    assert half.seconds == (10 + 30) + (10 + 30 + 30) + 2 * 2 * (10 + 30 + 30)
    assert half.line() == (
        "12 cells (a document read by a method), 2 done; to come: 10 cells of 4 documents, "
        "about 6 minutes"
    )
    short = make_plan([1000], [1], ["snapkv:memory=1/2"])
    done = cost_of(short, Journal(tmp_path / "half.jsonl"))
    assert (done.left, done.seconds) == (0, 0.0) and done.line().endswith("nothing is left")
    one = first_cells(plan)
    assert [(s.length, s.documents, s.methods) for s in one] == [
        (1000, 1, ("full", "snapkv:memory=1/2"))
    ]


def test_a_cells_seconds_are_those_of_its_method_and_of_the_nearest_length():
    lines = [
        {"method": method, "length": length, "seconds": seconds, "cpu_seconds": 99.0}
        for method, length, seconds in (
            ("full", 1000, 1.0), ("a", 1000, 2.0), ("a", 1000, 4.0), ("a", 8000, 40.0)
        )
    ]  # fmt: skip
    assert seconds_of(lines, 1000, "a") == 3.0
    assert seconds_of(lines, 6000, "a") == 30.0
    assert seconds_of(lines, 8000, "b") == 40.0, "as others take"
    assert seconds_of(lines, 2000, "full") == 2.0
    assert seconds_of(lines[1:], 1000, "full") is None and seconds_of(lines[:1], 1000, "a") is None


@needs_native
@pytest.mark.parametrize("suffix", ["", ".json"])
def test_results_are_written_where_an_absolute_path_says(suffix, tmp_path):
    """The command ends well after it wrote, and says the path."""
    out, arguments = tmp_path / "new" / "mine", ["--lengths", "512", "--documents", "1"]
    arguments += ["--methods", "", "--tasks", "language", "--threads", "1", "--text", TEXT]
    arguments += ["--folder", str(tmp_path / "journals"), "--out", f"{out}{suffix}"]
    app = typer.Typer()
    app.command()(quality_main)
    tried = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert tried.exit_code == 0 and "1 cells" in tried.output and not out.parent.exists()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    told = done.output.index("known after the first"), done.output.index("nothing is left")
    assert told[0] < told[1] < done.output.index("tokens, 1 documents")
    written = out.with_suffix(".json")
    assert list(json.loads(written.read_text())["lengths"]) == ["512"]
    assert f"wrote {written}" in done.output


def test_other_benchmarks_write_where_an_absolute_path_says(tmp_path):
    assert machine.write(str(tmp_path / "a" / "b"), {"x": 1}) == tmp_path / "a" / "b.json"
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"x": 1}
    assert machine.write(str(tmp_path / "c.json"), {"x": 2}) == tmp_path / "c.json"
