"""The tuner end to end on tiny models: files, caching, limits, errors."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from python.tiny_models import SMALL, VOCABULARY, greedy, has_native, prompt, tiny_model
from rich.console import Console
from transformers import DynamicCache
from typer.testing import CliRunner

from kvswap_torch import BudgetError, ConfigError, KVSwapCache, StorageError, SwapConfig
from kvswap_torch.config import Prefetch
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.tuning.api import at_length, tune
from kvswap_torch.tuning.calibration import CalibrationOptions
from kvswap_torch.tuning.pipeline import TuneOptions
from kvswap_torch.tuning.progress import Lines
from kvswap_torch.tuning.recall import Choice
from kvswap_torch.tuning.result import print_result, report_data
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.timing import (
    Duration,
    Pace,
    TimingPlan,
    calibrating_seconds,
    timing_seconds,
)

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="times sessions of the extension"),
    pytest.mark.usefixtures("one_thread"),
]
ROOT = Path(__file__).resolve().parents[2]
CHOICE = Choice(group_tokens=4, groups_max=16, sink_tokens=2, tail_tokens=8)
OPTIONS = TuneOptions(
    probe_seconds=1.5,
    sizes=(2, 4, 8),
    calibration=CalibrationOptions(choice=CHOICE, steps_max=16, rank_max=16),
)
MAMBA = transformers.MambaConfig(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4
)
CONTEXT, BATCH, BUDGET = 1024, 2, "2MiB"


def samples() -> tuple[list[Sample], list[Sample]]:
    def draw(seed: int) -> Sample:
        generator = torch.Generator().manual_seed(seed)
        return Sample(torch.randint(3, VOCABULARY, (300,), generator=generator), 260)

    return [draw(0), draw(1)], [draw(2)]


def run(model, tmp_path, budget=BUDGET, **arguments):
    arguments = {"samples": samples(), "options": OPTIONS, "work": tmp_path / "work"} | arguments
    return tune(model, CONTEXT, BATCH, budget, tmp_path, **arguments)


def test_a_long_context_is_tuned_for_as_many_tokens_as_the_defaults_attend():
    usual = TuneOptions()
    assert at_length(usual, 6144) == usual
    assert at_length(usual, 6145).calibration.choice == Choice(groups_max=200)
    assert at_length(usual, 6145).calibration.rank_max == usual.calibration.rank_max
    assert at_length(OPTIONS, 100_000) is OPTIONS, "what was given stands"


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=CONTEXT, **SMALL)


@pytest.fixture(scope="module")
def tuned(model, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tuned")
    return run(model, folder), folder


def test_a_cache_takes_what_the_tuner_writes(tuned, model, tmp_path):
    result, _ = tuned
    saved = result.save(tmp_path / "config.json")
    with KVSwapCache(model, path=tmp_path, config=tmp_path / "config.json") as cache:
        ours = greedy(model, prompt(1, 200), cache, tokens=4)
        assert cache.driver.projection_source == "file"
    assert ours.shape == (1, 204)
    assert {(row.batch, row.context) for row in saved.table} == {(1, CONTEXT), (2, CONTEXT)}


def test_what_is_written_answers_as_the_true_query(tuned, model, tmp_path):
    """Predictions are trusted only in layers that a calibration found fit for it."""
    result, _ = tuned
    saved = result.save(tmp_path / "config.json")
    unfit = set(result.measured.calibrated.true_query_layers)
    assert not unfit & set(result.ahead.trusted)
    assert saved.provenance["look_ahead"]["mode"] == saved.prefetch.mode
    assert len(saved.provenance["look_ahead"]["layers"]) == saved.model.layers
    verified, alone = (saved.with_settings({"prefetch.mode": mode}) for mode in ("verify", "off"))
    answers = []
    for config in (verified, alone):
        with KVSwapCache(model, path=tmp_path, config=config) as cache:
            answers.append(greedy(model, prompt(1, 300), cache, tokens=24))
    assert torch.equal(*answers)


def test_a_config_of_an_older_tuner_goes_on_trusting():
    shipped = SwapConfig.load(ROOT / "examples" / "reference_model" / "kvswap.json")
    assert shipped.prefetch == Prefetch(mode="trust", skip_layers=(1, 2))


def test_every_solution_keeps_the_budget(tuned, model, tmp_path):
    result, _ = tuned
    result.save(tmp_path / "config.json")
    for solved in result.solved:
        assert solved.chosen.memory_bytes <= result.budget_bytes
        with KVSwapCache(
            model,
            path=tmp_path,
            config=tmp_path / "config.json",
            kv_memory_bytes=BUDGET,
            max_context=solved.context,
            max_batch=solved.batch,
        ) as cache:
            wanted = solved.costs.config(solved.chosen.setting)
            assert cache.driver.config.group_tokens == wanted.group_tokens
            assert cache.driver.config.pages_max == wanted.pages_max


def test_where_the_context_fits_the_answers_are_the_full_caches(model, tmp_path):
    result = run(model, tmp_path, budget="64MiB")
    result.save(tmp_path / "config.json")
    assert all(solved.chosen.recall == 1.0 for solved in result.solved)
    inputs = prompt(1, 600)
    expected = greedy(model, inputs, DynamicCache(config=model.config))
    with KVSwapCache(
        model, path=tmp_path, config=tmp_path / "config.json", max_context=CONTEXT, max_batch=1
    ) as cache:
        assert torch.equal(greedy(model, inputs, cache), expected)


def test_the_same_measurements_give_the_same_bytes(tuned, model, tmp_path):
    result, folder = tuned
    names = ("config.json", "config.projection.safetensors")
    result.save(tmp_path / "first" / "config.json")
    run(model, folder).save(tmp_path / "second" / "config.json")
    for name in names:
        first, second = (tmp_path / side / name for side in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.long
def test_the_papers_solver_finds_settings_in_the_papers_regime(tuned, model):
    """From the least memory that has any to all of it: wherever the exhaustive one does."""
    _, folder = tuned
    need = {"exhaustive": set(), "greedy": set()}
    for solver, found in need.items():
        for size in (320, 326, 336, 360, 400, 500, 1024):
            options = dataclasses.replace(OPTIONS, solver=solver)
            try:
                result = run(model, folder, budget=f"{size}KiB", options=options)
            except BudgetError as error:
                assert "must be at least 333776 " in str(error) and size == 320
                continue
            assert all(each.chosen.memory_bytes <= size << 10 for each in result.solved)
            assert result.provenance()["solver"] == solver
            found.add(size)
    assert need["greedy"] == need["exhaustive"]
    assert len(need["greedy"]) == 6


@pytest.mark.long
def test_the_papers_svd_can_be_what_is_written(model, tmp_path):
    options = dataclasses.replace(OPTIONS, projection="svd_keys")
    result = run(model, tmp_path, options=options)
    config = result.save(tmp_path / "config.json")
    assert config.summary.projection == result.measured.calibrated.kind == "svd_keys"
    for key, query in result.measured.calibrated.pairs:
        assert torch.equal(key, query), "the SVD has one matrix for keys and queries"
    with KVSwapCache(model, path=tmp_path, config=tmp_path / "config.json") as cache:
        assert greedy(model, prompt(1, 200), cache, tokens=4).shape == (1, 204)
        assert cache.driver.projection_source == "file"
    with pytest.raises(ConfigError, match="projection must be one of query_aware, svd_keys"):
        run(model, tmp_path, options=dataclasses.replace(OPTIONS, projection="pca"))


def test_records_of_four_bits_are_tuned_for_and_tried_beside_others(model, tmp_path):
    """Bytes of a record are those that the cache reads; `all` says what each format would give."""
    options = dataclasses.replace(OPTIONS, records="int4")
    result = run(model, tmp_path, options=options)
    assert {each.chosen.setting.records for each in result.solved} == {"int4"}
    config = result.save(tmp_path / "config.json")
    assert config.storage.kv_dtype == "int4"
    with KVSwapCache(model, path=tmp_path, config=tmp_path / "config.json") as cache:
        assert greedy(model, prompt(1, 200), cache, tokens=4).shape == (1, 204)
        assert cache.driver.config.storage.kv_dtype == "int4"
    found = run(model, tmp_path, options=dataclasses.replace(OPTIONS, records="all"))
    console = Console(record=True, width=200, file=io.StringIO())
    print_result(found, console)
    told = re.findall(r"^records (\w+), batch", console.export_text(), re.MULTILINE)
    assert told == ["model", "fp8", "int4"]
    with pytest.raises(ConfigError, match="records must be one of model, fp8, int4, both, all"):
        run(model, tmp_path, options=dataclasses.replace(OPTIONS, records="q4"))


def test_another_limit_measures_nothing(tuned, model):
    result, folder = tuned
    told = []
    again = run(
        model,
        folder,
        budget="3MiB",
        samples=samples(),
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert [what for what, done, total in told if done < total] == []
    assert again.measured.timings == result.measured.timings


def test_interrupted_timings_go_on(tuned, model, tmp_path):
    _, folder = tuned
    work = tmp_path / "work"
    work.mkdir()
    for path in (folder / "work").iterdir():
        (work / path.name).write_bytes(path.read_bytes())
    kept = json.loads((work / "timings-local.json").read_text())
    places = [entry["place"] for entry in kept["data"]]
    kept["data"] = [entry for entry in kept["data"] if entry["place"]["batch"] == 1]
    assert 0 < len(kept["data"]) < len(places)
    (work / "timings-local.json").write_text(json.dumps(kept))
    told = []

    def stop(what: str, done: int, total: int) -> None:
        told.append(what)
        if what == "timing steps" and done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(
            model,
            CONTEXT,
            BATCH,
            BUDGET,
            folder,
            samples=samples(),
            options=OPTIONS,
            work=work,
            progress=stop,
        )
    after = json.loads((work / "timings-local.json").read_text())["data"]
    assert sorted(map(str, (entry["place"] for entry in after))) == sorted(map(str, places))
    assert after[: len(kept["data"])] == kept["data"]


def test_other_weights_are_measured_anew(tuned, tmp_path):
    _, folder = tuned
    other = tiny_model("llama", seed=5, max_position_embeddings=CONTEXT, **SMALL)
    told = set()
    run(
        other,
        folder,
        work=folder / "work",
        progress=lambda what, done, total: told.add(what) if done < total else None,
    )
    assert any(what.startswith("fitting") for what in told)


def test_a_damaged_calibration_is_named(tuned, model, tmp_path):
    _, folder = tuned
    work = tmp_path / "work"
    work.mkdir()
    for path in (folder / "work").iterdir():
        (work / path.name).write_bytes(path.read_bytes())
    (work / "calibration.safetensors").write_bytes(b"12345678")
    with pytest.raises(ConfigError, match=r"calibration .*calibration.safetensors: .* delete it"):
        run(model, folder, work=work)


def test_evaluation_compares_with_the_full_cache(tuned, model):
    _, folder = tuned
    found = run(model, folder, evaluate=True).evaluation
    assert found["tokens"] == 40
    assert 0 <= found["accuracy"] <= 1 and found["agreement"] > 0.5
    assert found["loss"] == pytest.approx(found["loss_full"], rel=0.2)


def test_too_small_a_budget_names_the_minimum_before_anything_is_measured(
    model, tmp_path, monkeypatch
):
    probe = "kvswap_torch.tuning.pipeline.probe_disk"
    monkeypatch.setattr(probe, lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(BudgetError, match=r"must be at least \d+ .*Lower max_context"):
        run(model, tmp_path, budget="64KiB")
    assert not list(tmp_path.rglob("*.*"))


def test_recall_out_of_reach_is_refused(tuned, model):
    _, folder = tuned
    options = dataclasses.replace(OPTIONS, min_recall=0.9999)
    with pytest.raises(BudgetError, match=r"recall of attention mass .* reach 0\.\d+"):
        run(model, folder, options=options, budget="800KiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": dataclasses.replace(OPTIONS, solver="magic")}, "solver must be one of"),
        ({"options": dataclasses.replace(OPTIONS, min_recall=2.0)}, "min_recall must be 0 to 1"),
        ({"samples": None}, "tokenizer must be given"),
        ({"samples": None, "calibration": ["/nowhere.txt"]}, "/nowhere.txt must be readable"),
    ],
)
def test_wrong_options_are_named(model, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(model, tmp_path, **arguments)


def test_a_context_that_the_model_was_not_made_for_is_refused_before_anything_is_measured(
    model, tmp_path
):
    with pytest.raises(ConfigError, match=r"at most the 1,024 tokens that.*got 1,025.*rope_type"):
        tune(model, CONTEXT + 1, BATCH, BUDGET, tmp_path, samples=samples())
    assert not any(tmp_path.iterdir())


def test_a_missing_folder_is_named(model, tmp_path):
    with pytest.raises(StorageError, match="missing"):
        work = tmp_path / "work"
        tune(model, CONTEXT, BATCH, BUDGET, tmp_path / "missing", samples=samples(), work=work)
    assert not any(tmp_path.iterdir()), "nothing is left where nothing was measured"


def test_an_unsupported_model_is_named(tmp_path):
    with pytest.raises(UnsupportedModelError, match="[Mm]amba"):
        run(transformers.MambaForCausalLM(MAMBA), tmp_path)


def test_the_command_line_tunes_and_draws(model, tmp_path):
    from kvswap_torch.tuning.cli import app

    model.save_pretrained(tmp_path / "model")
    wrong = CliRunner().invoke(
        app, ["--model", str(tmp_path), "--path", str(tmp_path), "--kv-memory", "1MiB"]
    )
    assert wrong.exit_code == 1
    assert wrong.stderr.startswith("error: --model: must be a model's folder or name")
    assert (wrong.stdout, wrong.stderr.count("\n")) == ("", 1)
    told = CliRunner().invoke(app, ["--help"])
    for option in ("--model", "--path", "--kv-memory", "--max-context", "--min-recall", "--device"):
        assert option in told.output


def test_progress_in_a_log_is_a_line_a_stage_and_one_now_and_then():
    told = []
    with Lines(told.append, every_s=0.02) as lines:
        lines("reading", 0, 3)
        lines("reading", 1, 3)
        while len(told) < 2:
            time.sleep(0.005)
        lines("reading", 3, 3)
        lines("timing", 0, 9)
        while "timing: 0 of 9" not in told[-1]:
            time.sleep(0.005)
    assert told[0] == "reading ..."
    assert re.fullmatch(r"reading: 1 of 3, about \d+ s left", told[1])
    assert "reading: done, 0 s" in told and "timing ..." in told
    assert re.fullmatch(r"timing: 0 of 9, \d+ s so far", told[-1])


def test_how_long_it_takes_at_least_is_said_before_anything_is_measured(
    model, tmp_path, monkeypatch
):
    told = []
    probe = "kvswap_torch.tuning.pipeline.probe_disk"
    monkeypatch.setattr(probe, lambda *a, **k: pytest.fail(f"told {told}"))
    with pytest.raises(pytest.fail.Exception, match=r"at least \d+ (s|min): disk 2 s, calibration"):
        run(model, tmp_path, tell=told.append)


def test_what_is_kept_takes_no_time(tuned, model, monkeypatch):
    _, folder = tuned
    told = []
    run(model, folder)  # other tests have left other measurements there
    run(model, folder, tell=told.append)
    assert told == ["all measurements are kept from an earlier run"]
    monkeypatch.setattr("kvswap_torch.tuning.pipeline.calibrate", lambda *a: pytest.fail(told[-1]))
    other = dataclasses.replace(OPTIONS, sizes=(4, 8))
    with pytest.raises(pytest.fail.Exception, match=r"at least .*: calibration \d.*, steps \d"):
        run(model, folder, tell=told.append, options=other)


def test_the_least_duration_counts_passes_and_steps():
    pace = Pace(token=0.01, linear=0.001, square=1e-6)
    assert pace.reading(1000) == pytest.approx(2.0)
    assert calibrating_seconds(pace, [1000, 1000], [1000]) == pytest.approx(12.0)
    plan = TimingPlan(1, 4096, 1 << 18, (8, 32), (4, 8), 256)
    steps = 3 * 6 * 2 * (10 + 4) * 0.01  # three sessions, six choices, two rounds
    assert timing_seconds(pace, plan) == pytest.approx(steps + 3 * 1.0)
    assert (
        str(Duration(40, 300, 0)) == "measuring takes at least 6 min: disk 40 s, calibration 5 min"
    )


def test_the_command_line_in_a_pipe_tells_each_stage(model, tmp_path, monkeypatch):
    """In a process of its own, so that nothing but its standard output is seen."""
    model.save_pretrained(tmp_path / "model")
    program = """
import sys
from kvswap_torch.tuning import api, cli
from tests.python.test_tuning_tune import OPTIONS, samples
real = api.tune
api.tune = lambda *a, **k: real(*a, **k | {"options": OPTIONS, "samples": samples()})
cli.app(sys.argv[1:], standalone_mode=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--model", str(tmp_path / "model"), "--no-report"]
        + ["--path", str(tmp_path), "--kv-memory", BUDGET, "--max-context", str(CONTEXT)]
        + ["--out", str(tmp_path / "config.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("measuring takes at least ")
    for stage in (
        "writing the scratch file",
        "reading",
        "fitting to predicted queries",
        "fitting to true queries",
        "measuring recall",
        "recording choices",
        "timing steps",
    ):
        assert f"{stage} ..." in lines
    assert any(line.startswith("wrote ") for line in lines)


def test_the_report_shows_the_chosen_setting(tuned, tmp_path):
    pytest.importorskip("matplotlib")
    result, _ = tuned
    page = result.report(tmp_path / "report")
    text = page.read_text()
    assert f"batch {BATCH}, context {CONTEXT:,}" in text
    pictures = sorted(path.name for path in page.parent.glob("*.png"))
    assert len(pictures) >= 5 and all(name in text for name in pictures)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.99, "1.0% faster than the exhaustive one"),
        (1.25, "25.0% slower than the exhaustive one"),
        (1.0, "as fast as the exhaustive one"),
        (1.0001, "as fast as the exhaustive one"),
        (0.9999, "as fast as the exhaustive one"),
    ],
)
def test_a_solver_is_said_to_be_faster_or_slower_without_a_minus(tuned, ratio, words):
    result, _ = tuned
    rows = []
    for row in result.solved:
        seconds = ratio * row.exhaustive.step_seconds
        rows.append(
            dataclasses.replace(row, greedy=dataclasses.replace(row.greedy, step_seconds=seconds))
        )
    changed = dataclasses.replace(result, solved=rows)
    console = Console(record=True, width=200, file=io.StringIO())
    print_result(changed, console)
    assert f"the paper's greedy solver, at worst: {words}\n" in console.export_text()
    assert report_data(changed).facts["greedy solver"] == words
    told = changed.provenance()["solutions"][0]
    assert told["greedy_slower_by"] == pytest.approx(ratio - 1, abs=1e-4)


def test_saved_config_is_the_schemas(tuned, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    from kvswap_torch.config.json_schema import schema

    result, _ = tuned
    result.save(tmp_path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text())
    jsonschema.validate(written, schema())
    assert written["provenance"]["solutions"][0]["batch"] == BATCH
    assert SwapConfig.load(tmp_path / "config.json").for_batch_and_context(1, 900).table == ()
