"""The reference model: its tasks, its training run, and what the shipped weights can do."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tools.reference_model import texts as texts_module
from tools.reference_model import train as train_module
from tools.reference_model.checkpoint import (
    NAME,
    PREVIOUS,
    CheckpointError,
    CheckpointWriter,
    load_checkpoint,
    pack_checkpoint,
    read_checkpoint,
    write_atomic,
)
from tools.reference_model.dilution import PIECE, ROWS, STEPS, Dilution, attend_with_text, show
from tools.reference_model.documents import SOURCES, load_source, make_document
from tools.reference_model.evaluate import Reader, wilson
from tools.reference_model.forms import FORMS, Words
from tools.reference_model.model import (
    export_model,
    load_weights,
    make_config,
    make_model,
)
from tools.reference_model.phases import CPU, FIRST, GPU, Phase
from tools.reference_model.plot import draw_plot
from tools.reference_model.samples import KINDS, Sampler, draw_positions
from tools.reference_model.tasks import (
    SKILLS,
    Question,
    answer_turn,
    draw_task,
    extract_answer,
    lay_in,
    question_prompt,
)
from tools.reference_model.texts import MissingTexts, load_texts
from tools.reference_model.trainer import Run

FOLDER = Path("examples/reference_model").resolve()
TINY = Phase("tiny", 256, 2, 2048, (1e-3, 1e-3), 1024, copy_share=0.5, shares=FIRST)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(FOLDER)


@pytest.fixture
def run(tokenizer: Tokenizer, tmp_path: Path) -> Run:
    """A run of a tiny model on a shipped document."""
    torch.manual_seed(0)
    tokens = np.array(tokenizer.encode(load_source("perl_operators")).ids, dtype=np.uint16)
    sampler = Sampler(tokenizer, tokens, Words())
    model = make_model(make_config(layers=1, hidden=64, heads=2))
    return Run(model, (TINY,), sampler, sampler, tmp_path, compiled=False)


# Tasks


@pytest.mark.parametrize("skill", SKILLS)
def test_a_task_repeats_for_one_seed_and_its_facts_hold_the_answer(skill):
    first, second = (draw_task(np.random.default_rng(3), skill, Words()) for _ in range(2))
    assert first == second
    assert first != draw_task(np.random.default_rng(4), skill, Words())
    joined = " ".join(first.facts)
    unnumbered = re.sub(r"(^|, )\d = ", " ", first.question.answer)
    for word in unnumbered.replace(",", " ").replace(";", " ").split():
        assert word.strip('."[]=:') in joined


def test_an_unknown_skill_is_refused():
    with pytest.raises(ValueError, match="skill must be one of"):
        draw_task(np.random.default_rng(0), "juggle", Words())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_names_key_and_value(form):
    assert all("{k}" in fact and "{v}" in fact for fact in form.facts)
    assert all("{k}" in question for question in (*form.same, *form.other))


def test_facts_lie_at_the_depths_asked_for():
    rng = np.random.default_rng(0)
    tasks = [draw_task(rng, "same", Words()) for _ in range(3)]
    document, questions = lay_in(rng, "line\n" * 100, tasks, [0.0, 0.5, 1.0])
    lines = document.split("\n")
    assert [question.depth for question in questions] == [0.0, 0.5, 1.0]
    assert lines[0] == tasks[0].facts[0]
    assert lines[51] == tasks[1].facts[0]
    assert lines[-2] == tasks[2].facts[0]
    with pytest.raises(ValueError, match="depths must be 3 numbers"):
        lay_in(rng, "line\n", tasks, [0.0, 2.0, 1.0])


def test_a_turn_reads_back_as_its_answer():
    question = Question("What is the code?", "47193", "same")
    assert question_prompt(question) == "Question: What is the code?\nAnswer:"
    assert extract_answer(answer_turn(question) + "Question: more") == "47193"


@pytest.mark.parametrize("name", SOURCES)
def test_documents_are_long_and_repeat_for_one_seed(name, reader):
    source = load_source(name)
    assert reader.count(source) >= 24_000
    first = make_document(source, 5, 24_000, reader.count, depths=[0.1, 0.3, 0.5, 0.6, 0.8, 0.9])
    again = make_document(source, 5, 24_000, reader.count, depths=[0.1, 0.3, 0.5, 0.6, 0.8, 0.9])
    other = make_document(source, 6, 24_000, reader.count)
    assert first == again
    assert first != other
    assert 23_000 < reader.count(first[0]) <= 24_000
    with pytest.raises(ValueError, match="load_source: name must be"):
        load_source("novel")


def test_held_out_documents_are_not_trained_on():
    assert {f"{name}.txt" for name in SOURCES} == set(texts_module.DOCUMENTS.values())
    assert all(texts_module.Text(name, "").held_out for name in texts_module.DOCUMENTS)


# Samples


@pytest.mark.parametrize("phase", [TINY, CPU[1], GPU[-1]], ids=lambda phase: phase.name)
def test_samples_fill_their_length_and_mark_answers(run, phase):
    batch = run.sampler.batch(np.random.default_rng(1), phase)
    assert batch.ids.shape == batch.kinds.shape == batch.positions.shape
    assert batch.ids.shape == (phase.batch, phase.length)
    assert batch.positions.max() < max(phase.span, phase.length)
    for row, first, last in batch.spans:
        assert batch.ids[row, last - 1] == run.sampler.newline
        assert batch.kinds[row, first] >= KINDS.index(SKILLS[0])


def test_skipped_positions_grow_and_stay_in_the_span():
    rng = np.random.default_rng(0)
    for _ in range(50):
        positions = draw_positions(rng, 64, 1000)
        assert (np.diff(positions) >= 1).all()
        assert positions[-1] < 1000


# A long text beside the end of a sample


def test_the_last_rows_attend_to_the_text_too():
    torch.manual_seed(0)
    tokens, text = ROWS + 16, 48
    query, key, value = (torch.randn(1, heads, tokens, 8) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.text_keys, module.text_values = (torch.randn(1, 2, text, 8).bfloat16() for _ in range(2))
    causal = torch.ones(tokens, tokens).tril().bool()
    module.text_mask = torch.cat([torch.ones(ROWS, text).bool(), causal[16:]], 1)
    found = attend_with_text(module, query, key, value, None)
    keys, values = (
        torch.cat([long.float(), own], 2).repeat_interleave(2, 1)
        for long, own in ((module.text_keys, key), (module.text_values, value))
    )
    seen = torch.cat([torch.zeros(tokens, text).bool(), causal], 1)
    seen[16:, :text] = True
    scores = (query @ keys.mT / 8**0.5).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(found, scores.softmax(-1) @ values, atol=2e-2, rtol=2e-2)


def test_the_text_is_read_anew_after_some_steps(run):
    dilution = Dilution(run.model, 1, 2 * ROWS, 1 << 16)
    module = run.model.model.layers[0].self_attn
    rng = np.random.default_rng(0)

    def draw(_, tokens):
        return np.arange(tokens) % 50

    seen = []
    for _ in range(STEPS + 1):
        dilution.renew(rng, draw)
        seen.append(module.text_keys.clone())
    assert seen[0].shape[2] == PIECE and seen[0].abs().sum() > 0
    assert all(torch.equal(keys, seen[0]) for keys in seen[:STEPS])
    assert not torch.equal(seen[STEPS], seen[0])
    show(run.model, True)
    assert module.sees_text
    assert not any("text" in name for name in run.model.state_dict())


# Running, stopping, going on


def test_a_stopped_run_goes_on_to_the_same_weights(run, tokenizer, tmp_path):
    straight = Run(
        make_model(run.model.config),
        (TINY,),
        run.sampler,
        run.sampler,
        tmp_path / "straight",
        compiled=False,
    )
    straight.folder.mkdir()
    straight.model.load_state_dict(run.model.state_dict())
    for _ in range(4):
        straight.step(TINY)
    for _ in range(2):
        run.step(TINY)
    run.save()
    run.writer.wait()
    resumed = Run(
        make_model(run.model.config), (TINY,), run.sampler, run.sampler, tmp_path, compiled=False
    )
    assert resumed.resume() == []
    assert resumed.place.step == 2
    for _ in range(2):
        resumed.step(TINY)
    wanted, got = straight.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_training_ends_with_log_and_plot(run, tmp_path):
    with Progress(disable=True) as progress:
        assert run.train(60, progress)
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert entries[0]["phase"]["length"] == TINY.length
    assert "accuracy" in entries[-1]
    draw_plot(tmp_path / "log.jsonl", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_damaged_checkpoint_falls_back_and_says_so(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.save({"step": 1})
    writer.save({"step": 2})
    writer.wait()
    assert load_checkpoint(tmp_path) == ({"step": 2}, [])
    data = bytearray((tmp_path / NAME).read_bytes())
    data[60] ^= 1
    (tmp_path / NAME).write_bytes(bytes(data))
    state, complaints = load_checkpoint(tmp_path)
    assert state == {"step": 1}
    assert "checksum does not match" in complaints[0]
    (tmp_path / PREVIOUS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="must hold a whole checkpoint"):
        load_checkpoint(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "weights"
    write_atomic(path, b"earlier")
    (tmp_path / "weights.part").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left"):
        write_atomic(path, b"later")
    assert path.read_bytes() == b"earlier"


def test_a_checkpoint_runs_nothing_when_it_is_read(tmp_path):
    """Whose bytes and checksum are whole, and which holds more than numbers."""
    ran = tmp_path / "ran"
    (tmp_path / NAME).write_bytes(pack_checkpoint({"step": Touches(ran)}))
    with pytest.raises(CheckpointError, match=r"must hold tensors, numbers.*alone"):
        read_checkpoint(tmp_path / NAME)
    assert not ran.exists()


class Touches:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()


def test_a_training_run_goes_on_from_its_checkpoint(run, tmp_path):
    """All that a run saves is of the kinds that a checkpoint may hold."""
    run.step(TINY)
    run.save()
    run.writer.wait()
    place, drawn = run.place.step, run.rng.bit_generator.state
    run.rng.random(7)
    run.place.step += 5
    assert run.resume() == []
    assert (run.place.step, run.rng.bit_generator.state) == (place, drawn)


@pytest.mark.parametrize("user", [0, 1000])
def test_missing_texts_are_said_plainly_and_nothing_is_installed(monkeypatch, user):
    monkeypatch.setattr(texts_module, "list_files", lambda *_: [])
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(subprocess, "Popen", None)  # no program can be started
    with pytest.raises(MissingTexts, match=r"python3\.11-doc and perl-doc .*; run: make texts"):
        load_texts()


def test_too_little_memory_and_a_missing_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(train_module.os, "sysconf", lambda name: 1024)
    with pytest.raises(ValueError, match="memory must be at least 6 GiB"):
        train_module.check_machine("cpu")
    monkeypatch.setattr(train_module.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        train_module.check_machine("gpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "abacus"], "preset must be one of"),
        (["--first-phase", "99"], "first-phase must be 0 to"),
        ([], "must hold no checkpoint"),
    ],
)
def test_the_command_refuses_what_cannot_be_meant(tmp_path, arguments, message):
    (tmp_path / NAME).write_bytes(b"something")
    result = CliRunner().invoke(train_module.app, ["--work", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_a_write_that_fails_behind_the_training_is_not_lost(tmp_path):
    writer = CheckpointWriter(tmp_path / "missing")
    writer.save({"step": 1})
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.wait()


def test_weights_of_another_shape_are_refused(tmp_path):
    model = make_model(make_config(layers=1, hidden=64, heads=2))
    with pytest.raises(ValueError, match="must exist"):
        load_weights(model, tmp_path)
    export_model(make_model(make_config(layers=2, hidden=64, heads=2)), tmp_path, newline=5)
    with pytest.raises(ValueError, match="must fit the model"):
        load_weights(model, tmp_path)


def test_exported_weights_can_be_trained_on(tmp_path):
    model, other = (make_model(make_config(layers=1, hidden=64, heads=2)) for _ in range(2))
    export_model(model, tmp_path, newline=5)
    load_weights(other, tmp_path)
    wanted, got = model.state_dict(), other.state_dict()
    assert all(torch.equal(wanted[name].bfloat16(), got[name].bfloat16()) for name in wanted)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 1


def test_wilson_intervals_hold_the_share():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(48, 50)
    assert 0.86 < low < 0.96 < high < 1.0


# What the shipped weights can do


def test_the_folder_is_small_and_stock():
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size <= 16 * 2**20
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert 6 <= config["num_hidden_layers"] <= 8
    assert config["num_key_value_heads"] * config["head_dim"] >= 256


def test_generate_answers_and_stops():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    text = load_source("python_logging")
    document, questions = make_document(text, 11, 2048, count, asked=("same",), facts=9)
    prompt = tokenizer(document + question_prompt(questions[0]), return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=30)
    written = tokenizer.decode(out[0, prompt.input_ids.shape[1] :])
    assert written == answer_turn(questions[0])


@pytest.mark.parametrize(("skill", "mark"), [("same", 0.95), ("other", 0.9)])
def test_facts_are_found_among_others(reader, skill, mark):
    right = asked = 0
    for seed, name in enumerate(SOURCES * 2):
        tokens = 2048 if seed < 2 else 4096
        text, questions = make_document(
            load_source(name), seed, tokens, reader.count, asked=(skill,) * 6, facts=9
        )
        reader.read(text)
        right += sum(reader.answers(question, keep=True) for question in questions)
        asked += len(questions)
    assert right / asked >= mark


def test_answers_of_several_parts_are_whole(reader):
    right = asked = 0
    for seed, name in enumerate(SOURCES):
        text, questions = make_document(
            load_source(name),
            seed,
            4096,
            reader.count,
            asked=("list", "pair", "hop", "record") * 3,
            facts=4,
        )
        reader.read(text)
        right += sum(reader.answers(question) for question in questions)
        asked += len(questions)
    assert right / asked >= 0.9
