"""The tasks of ``kvswap compare``: what is laid in answers what is asked, and nothing else does."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvswap_torch.cli import compare as cli
from kvswap_torch.cli.app import app
from kvswap_torch.compare import results, tasks
from kvswap_torch.compare.data import Question, Questions
from kvswap_torch.compare.tasks import TASKS, parse_tasks
from kvswap_torch.compare.writing import Asked, write_document, write_questions
from kvswap_torch.errors import ConfigError
from kvswap_torch.tuning.documents import shipped_texts
from tests.python.tiny_models import has_native

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(20)
needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")


class Words:
    """A tokenizer of words and single marks."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(re.findall(r"\w+|[^\w\s]", text))}


def drawn(name: str, seed: int) -> tasks.Laid:
    return TASKS[name](random.Random(seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["needle", "multi-key"])
def test_one_line_says_each_number_and_the_answer_begins_like_it(name, seed):
    laid = drawn(name, seed)
    assert len(laid.questions) == tasks.ASKED
    assert len(laid.lines) == (tasks.KEYS if name == "multi-key" else tasks.ASKED)
    for question in laid.questions:
        (answer,) = question.answers
        assert laid.lines.count(f"{question.prefix} {answer}.") == 1
        assert sum(answer in line for line in laid.lines) == 1
        assert sum(line.startswith(f"{question.prefix} ") for line in laid.lines) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_all_values_of_a_key_are_asked_for_in_the_documents_order(seed):
    laid = drawn("multi-value", seed)
    for question in laid.questions:
        name = question.text.removesuffix("?").split(" of ")[1]
        said = [line for line in laid.lines if f" of {name} is " in line]
        assert tuple(re.findall(r"\d{6}", " ".join(said))) == question.answers
        assert len(question.answers) == tasks.VALUES and question.needs_all
    assert len(laid.lines) == tasks.VALUES * len(laid.questions)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_values_are_asked_for_in_the_questions_order(seed):
    laid = drawn("multi-query", seed)
    for question in laid.questions:
        one, two = re.search(r"settings (\w+) and (\w+)\?", question.text).groups()
        values = {line.split()[1]: line.split()[-1].strip(".") for line in laid.lines}
        assert question.answers == (values[one], values[two]) and one != two
    assert len(laid.lines) == len(values) == 2 * len(laid.questions)


@pytest.mark.parametrize("seed", SEEDS)
def test_variables_are_those_that_a_reader_who_follows_the_lines_finds(seed):
    laid, found = drawn("variables", seed), {}
    for line in laid.lines:
        name, value = re.fullmatch(r"Assign (V\d\d) = (\w+)", line).groups()
        assert name not in found
        found[name] = found[value] if value.startswith("V") else value  # was assigned before
    assert len(set(found.values())) == len(laid.questions) == tasks.CHAINS
    for question in laid.questions:
        value = re.search(r"\d{6}", question.text).group()
        assert {name for name in found if found[name] == value} == set(question.answers)
        assert len(question.answers) == tasks.LINKS


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["common-words", "frequent-words"])
def test_the_most_frequent_words_are_the_answer_without_a_tie(name, seed):
    laid = drawn(name, seed)
    (question,) = laid.questions
    counts = Counter(word for line in laid.lines for word in re.findall(r"\b[a-z]+\b", line))
    ordered = counts.most_common()
    most = len(question.answers)
    assert {word for word, _ in ordered[:most]} == set(question.answers)
    assert ordered[most - 1][1] > ordered[most][1], "no tie with what is not asked for"
    assert question.needs_all
    if name == "frequent-words":
        assert [word for word, _ in ordered[:most]] == list(question.answers)


@pytest.mark.parametrize("tokens", [1500, 4096, 16384])
def test_documents_have_the_facts_of_all_tasks_and_fit(tokens):
    asked = Asked(tuple(TASKS), tokens)
    document, questions = write_document(asked, 1, Words())
    count = len(Words()(document)["input_ids"])
    assert 0.95 * tokens < count <= tokens
    assert {question.task for question in questions} == set(TASKS)
    lines = document.split("\n")
    for name in TASKS:
        laid = TASKS[name](random.Random(f"0 1 {name}")).lines
        places = [lines.index(line) for line in laid]
        assert places == sorted(places) and [lines.count(line) for line in laid] == [1] * len(laid)
    held_out = [text for at, text in enumerate(shipped_texts()) if at % 3 == 0]
    facts = {line for name in TASKS for line in TASKS[name](random.Random(f"0 1 {name}")).lines}
    texts = [line for line in lines if len(line) > 60 and line not in facts]
    assert len(texts) > 5
    assert all(any(line in text for text in held_out) for line in texts[1:-1])


def test_facts_stand_all_over_the_document():
    document, _ = write_document(Asked(("multi-key",), 8000), 0, Words())
    places = [document.index(line) / len(document) for line in
              TASKS["multi-key"](random.Random("0 0 multi-key")).lines]  # fmt: skip
    assert min(places) < 0.25 and max(places) > 0.75


def test_a_task_asks_the_same_whichever_others_there_are(tmp_path):
    alone = write_document(Asked(("variables",), 1500), 0, Words())[1]
    _, together = write_document(Asked(tuple(TASKS), 1500), 0, Words())
    assert alone == [question for question in together if question.task == "variables"]
    others = [write_document(Asked(("variables",), 1500, seed=seed), at, Words())[1]
              for seed, at in ((1, 0), (0, 1))]  # fmt: skip
    assert alone != others[0] != others[1] != alone


def test_what_was_written_is_read_as_it_was_asked(tmp_path):
    path, asked = tmp_path / "x.jsonl", Asked(("needle", "common-words"), 900, 2, 5)
    write_questions(path, asked, Words())
    first = path.read_bytes()
    write_questions(path, asked, Words())
    assert path.read_bytes() == first and list(tmp_path.iterdir()) == [path]
    read = Questions(path)
    assert (len(read), read.questions) == (2, 2 * (tasks.ASKED + 1))
    for document in read:
        text, questions = write_document(asked, document.number, Words())
        assert document.text == text and document.questions == tuple(questions)
    row = json.loads(path.read_text().splitlines()[0]) | {"task": [3]}
    path.write_text(json.dumps(row))
    with pytest.raises(
        ConfigError, match="line 1: task must be a text or a whole number, got \\[3\\]"
    ):
        Questions(path)


def test_too_little_room_for_text_is_refused():
    with pytest.raises(ConfigError, match="facts must leave a fifth of --tokens 200 for text"):
        write_document(Asked(tuple(TASKS), 200), 0, Words())


def test_names_of_tasks():
    assert parse_tasks("all") == tuple(TASKS)
    assert parse_tasks("variables, needle,variables") == ("variables", "needle")
    assert parse_tasks("needle,all")[0] == "needle" and len(parse_tasks("needle,all")) == len(TASKS)
    assert ", ".join(TASKS) == cli.TASK_NAMES, "the help names them without loading torch"
    page = (ROOT / "docs" / "how-to" / "compare.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \| [A-Z]", page, re.MULTILINE)) == set(TASKS)


def test_accuracy_is_summed_up_by_task():
    def run(document: int, *answers: tuple[str, float]) -> dict:
        told = [{"accuracy": value, "loss": 0.0, "task": task} for task, value in answers]
        return {"document": document, "tokens": 9, "full_bytes": 9, "memory_bytes": 9,
                "bytes_read_per_token": 0, "ms_per_token": 1.0, "answers": told}  # fmt: skip

    runs = [run(0, ("a", 1.0), ("b", 0.0)), run(1, ("a", 0.0), ("b", 0.0))]
    found = results.summary(runs, None)["tasks"]
    assert found["a"] == (0.5, 0.0, 1.0) and found["b"] == (0.0, 0.0, 0.0)
    for each in runs:
        for answer in each["answers"]:
            del answer["task"]
    assert results.summary(runs, None)["tasks"] == {}
    assert Question("q", ("a",)).task == ""


@needs_native
def test_the_command_writes_the_questions_and_shows_each_task(tiny_model_dir, tmp_path):
    out = tmp_path / "out.json"
    command = ["compare", "--model", str(tiny_model_dir), "--tasks", "needle,variables",
               "--tokens", "400", "--documents", "1", "--methods", "kvswap,h2o", "--budget",
               "tokens:64,bytes:1/2", "--out", str(out), "--path", str(tmp_path),
               "--max-new-tokens", "4", "--dtype", "float32"]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out.json", "out.svg", "out.journal.jsonl", "out.questions.jsonl"}
    found = json.loads(out.read_text())
    labels = {results.label(each) for each in found["methods"]}
    assert labels == {"full", *(f"{name}@{budget}" for name in ("kvswap", "h2o")
                                for budget in ("tokens:64", "bytes:1/2"))}  # fmt: skip
    measured = [each for each in found["methods"] if each["runs"]]
    assert len(measured) >= 3
    for method in measured:
        assert set(method["summary"]["tasks"]) == {"needle", "variables"}
    assert re.search(r"method +budget +needle +variables", done.output)
    again = CliRunner().invoke(app, command)
    assert "all 5 runs done before" in again.output, "the same questions are written again"
