"""``kvswap compare``: what is asked, what methods make of a budget, and what is written."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvswap_torch import SwapConfig, presets
from kvswap_torch.cli.app import app
from kvswap_torch.cli.compare import cost_lines, smaller_settings
from kvswap_torch.cli.prompt import Prompt, make_prompt
from kvswap_torch.compare import asking, results
from kvswap_torch.compare import budget as compare_budget
from kvswap_torch.compare.asking import Way, judge
from kvswap_torch.compare.comparison import Comparison
from kvswap_torch.compare.data import Document, Question, Questions
from kvswap_torch.compare.journal import Journal
from kvswap_torch.compare.method import Budget, Method, with_tokens
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import BudgetError, ConfigError
from kvswap_torch.keep import drops
from kvswap_torch.plug_ins import TokenScores, Worth
from kvswap_torch.sizing import ModelShape
from tests.python.tiny_models import character_tokenizer, greedy, has_native, tiny_model

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{document}/{question}="
TEXTS = ("abcdefghij" * 14, "klmnopqrstu" * 12)
NEW_TOKENS = 6
needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


class AllAlike(TokenScores):
    """Retains the first tokens."""

    def worth(self, layer, query, keys, values) -> Worth:
        return Worth(torch.zeros(keys.shape[0], keys.shape[2]))


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def asked(path: Path, **row: Any) -> Question:
    (document,) = Questions(lines(path, row))
    (question,) = document.questions
    return question


def test_lines_of_one_document_belong_together_and_one_is_in_memory(tmp_path) -> None:
    rows = [{"document": text, "question": f"{n}?", "answer": "x"} for n in "12" for text in TEXTS]
    file = lines(tmp_path / "x.jsonl", *rows)
    with file.open("a") as more:
        more.write("\n")
    questions = Questions(file)
    assert (len(questions), questions.questions) == (2, 4)
    assert [(d.number, d.text, [q.text for q in d.questions]) for d in questions] == [
        (number, text, ["1?", "2?"]) for number, text in enumerate(TEXTS)
    ]
    assert all(text not in repr(vars(questions)) for text in TEXTS)


def test_the_fields_of_longbench_and_ruler_are_known(tmp_path) -> None:
    file = tmp_path / "x.jsonl"
    assert asked(file, document="d", question="q", answer="a") == Question("q", ("a",))
    longbench = asked(file, context="d", input="q", answers=["a", "b"], length=9, dataset="qasper")
    assert longbench == Question("q", ("a", "b")) and longbench.expected == "a"
    ruler = asked(file, index=0, input="text\nWhat? They are", outputs=["1", "2"], length=4096)
    assert ruler == Question("\nWhat? They are", ("1", "2"), needs_all=True, is_prompt=True)
    assert ruler.expected == "1, 2" and next(iter(Questions(file))).text == "text"
    pressed = asked(file, context="d", question="q", answer=["7"], answer_prefix="It is")
    assert pressed == Question("q", ("7",), prefix="It is")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: must be a JSON object, got"),
        ("[1]", r"line 2: must be a JSON object, got b'\[1\]"),
        ('{"text": "a"}', r"line 2: must have the fields \{document, question, answer\}.*got text"),
        ('{"document": "a", "answer": "b"}', "line 2: must have the fields .*got document, answer"),
        ('{"document": " ", "question": "b", "answer": "c"}', "document must be a text, got ' '"),
        ('{"document": "a", "question": "b", "answer": []}', r"answer must be a text.* got \[\]"),
        ('{"input": "a", "outputs": ["b"]}', "input must have a line for the question"),
    ],
)
def test_a_line_that_is_no_question_is_refused_by_its_number(line, told, tmp_path) -> None:
    file = lines(tmp_path / "x.jsonl", {"document": "a", "question": "b", "answer": "c"})
    with file.open("a") as more:
        more.write(line + "\n")
    with pytest.raises(ConfigError, match=told):
        Questions(file)


def test_a_file_without_lines_and_one_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ConfigError, match="must have a question on each line, got .*none"):
        Questions(lines(tmp_path / "x.jsonl"))
    with pytest.raises(ConfigError, match="--data: must be a file of JSON lines.*No such file"):
        Questions(tmp_path / "y.jsonl")


def test_what_is_right() -> None:
    one = Question("", ("Copper  Lantern.",))
    assert judge("It is the copper lantern, I think", one) == 1.0
    assert judge("a lantern of copper", one) == 0.0
    assert judge("b", Question("", ("a", "b"))) == 1.0
    assert judge("b", Question("", ("a", "b"), needs_all=True)) == 0.5


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("tokens:64", "tokens", 64), ("bytes:1/13", "bytes", Fraction(1, 13)),
     ("bytes:0.5", "bytes", Fraction(1, 2)), ("bytes:2MiB", "bytes", 2 << 20)],
)  # fmt: skip
def test_budgets(text, kind, value) -> None:
    assert Budget.parse(text) == Budget(text, kind, value)


def test_several_budgets_and_all_methods_are_named_at_once() -> None:
    budgets = Budget.parse_all(["tokens:64, bytes:1/13", "tokens:64"])
    assert [budget.text for budget in budgets] == ["tokens:64", "bytes:1/13"]
    with pytest.raises(ConfigError, match="--budget: must be"):
        Budget.parse_all(["tokens:64,"])
    every = [preset.name for preset in presets() if not preset.needs]
    asked = Method.parse_all("quest:selection.group_tokens=32, all,quest")
    assert [each.name for each in asked] == ["quest:selection.group_tokens=32", *every]
    assert {preset.name for preset in presets()} - set(every) == {"compresskv"}
    assert [each.name for each in Method.parse_all("h2o,h2o")] == ["h2o"]


@pytest.mark.parametrize("text", ["64", "tokens:", "tokens:0", "bytes:2/1", "bytes:1/0", "b:1"])
def test_what_is_no_budget(text) -> None:
    with pytest.raises(ConfigError, match=f"--budget: must be tokens:N.*got '{text}'"):
        Budget.parse(text)


@pytest.mark.parametrize("name", [p.name for p in presets() if not p.needs and p.name != "exact"])
def test_every_preset_attends_at_most_the_tokens_of_a_budget_and_nearly_so_many(name) -> None:
    for tokens in (512, 1024, 1537):
        config = with_tokens(SwapConfig.preset(name), tokens)
        settings = settings_of(config)
        attended = config.selection.sink_tokens + config.selection.recent_tokens
        attended += settings.get("retention.tokens", 0)
        group = 1
        if not drops(config):
            group = config.selection.group_tokens
            attended += group * config.selection.top_k_groups
            assert config.memory.pages_per_layer >= config.selection.top_k_groups
        assert tokens - group < attended <= tokens


def test_what_attends_everything_has_no_budget_of_tokens_and_too_few_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be of a method that selects, got one that attends"):
        with_tokens(SwapConfig.preset("exact"), 1024)
    with pytest.raises(BudgetError, match="tokens:9: must be at least .* a group of 16"):
        with_tokens(SwapConfig.preset("quest"), 9)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kvswop", "preset: must be one of"),
        ("quest:rank", "settings must be PATH=VALUE .*got 'rank' in 'quest:rank'"),
        ("no_such.Thing", "module.Class of a plug-in, got 'no_such.Thing'"),
        ("json.JSONDecoder", "must be a class made from"),
        ("examples.plug_ins.AskedFromAhead", r"made without arguments, has \(rope_theta: 'float'"),
    ],
)
def test_unknown_methods_are_refused(name, told) -> None:
    with pytest.raises(ConfigError, match=told):
        Method.parse(name)


@pytest.fixture
def questions(tmp_path) -> Questions:
    """Two documents, two questions each: one whose answer is what the model goes on with."""
    rows = []
    for text in TEXTS:
        for question, is_right in (("ab", True), ("xyz", False)):
            answer = continuation(text, question) if is_right else "~~~"
            rows.append({"document": text, "question": question, "answer": answer})
    return Questions(lines(tmp_path / "x.jsonl", *rows))


def continuation(text: str, question: str) -> str:
    tokenizer = character_tokenizer()
    # " " is none of the tokenizer's characters, and is dropped.
    ids = tokenizer(f"{text}/{question}=", return_tensors="pt")["input_ids"]
    told = greedy(tiny_model("llama"), {"input_ids": ids})[0, ids.shape[1] :][:4]
    return tokenizer.decode(told)


def comparison(data: Questions, tmp_path: Path, methods: str, *budgets: str, **changed: Any):
    tokenizer = character_tokenizer()
    way = Way(new_tokens=NEW_TOKENS, **{k: v for k, v in changed.items() if k != "is_beside_full"})
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    return Comparison(
        tiny_model("llama"), tokenizer, make_prompt(TEMPLATE, tokenizer), data,
        [Method.parse(name) for name in methods.split()], [Budget.parse(b) for b in budgets], way,
        disk, tmp_path / "out.journal.jsonl", is_beside_full=changed.get("is_beside_full", True),
    )  # fmt: skip


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {results.label(method): method for method in found["methods"]}


class Letters:
    """A tokenizer whose tokens are the characters' numbers."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) for each in text]}


@pytest.mark.parametrize(
    ("is_chat", "prefix", "asked", "answer"),
    [
        (True, "", "q=", "7"),
        (True, "It is", "q=It is", " 7"),
        (True, "It is ", "q=It is ", "7"),
        (False, "", "q=", " 7"),
        (False, "It is", "q= It is", " 7"),
        (False, "\nIt is\n", "q=\nIt is\n", "7"),
    ],
)
def test_an_answer_follows_what_is_begun_for_it_after_a_space(is_chat, prefix, asked, answer):
    document = Document(0, "d", (Question("q", ("7",), prefix=prefix),))
    prompt = Prompt("", "{question}=", "{question}=", special_tokens=not is_chat)
    found = asking.encoded(document, Letters(), prompt, NEW_TOKENS)
    told = ["".join(map(chr, ids)) for ids in (found.asked[0].ids, found.asked[0].answer)]
    assert told == [asked, answer]


@needs_native
@pytest.mark.parametrize("way", [asking.STEPS, asking.ONE_PASS])
def test_a_budget_that_covers_gives_what_one_pass_without_a_cache_gives(
    way, questions, tmp_path
) -> None:
    """Of every kind of method; the second question is as if it were the first."""
    compared = comparison(
        questions, tmp_path, "kvswap:selection.max_step_tokens=4 quest h2o", "tokens:2048",
        questions=way,
    )  # fmt: skip
    compared.run()
    found = by_name(results.summarised(compared.results()))
    assert len(found) == 4
    model, tokenizer = tiny_model("llama"), character_tokenizer()
    for document in questions:
        for number, question in enumerate(document.questions):
            text = f"{document.text}/{question.text}="
            before = tokenizer(text)["input_ids"]
            answer = tokenizer(question.expected, add_special_tokens=False)["input_ids"]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([before + answer])).logits[0]
            logs = logits[len(before) - 1 : -1].log_softmax(-1)
            loss = -logs.gather(1, torch.tensor(answer)[:, None]).mean().item()
            for method in found.values():
                told = method["runs"][document.number]["answers"][number]
                assert told["loss"] == pytest.approx(loss, abs=1e-3)
                assert told["accuracy"] == float(number == 0)
    for method in found.values():
        told = method["summary"]
        assert told["accuracy"] == (0.5, 0.5, 0.5) and (told["documents"], told["answers"]) == (
            2,
            4,
        )
        if method["name"] != "full":
            assert told["accuracy_difference"] == (0.0, 0.0, 0.0)
            assert abs(told["loss_difference"][0]) < 1e-3
    assert list((tmp_path / "disk").iterdir()) == []


@needs_native
def test_a_document_is_read_once_by_a_method(questions, tmp_path, monkeypatch) -> None:
    read: list[tuple[str, int]] = []
    whole = asking._Reader.read

    def noted(self, ids):
        if len(ids) > 1:
            read.append((type(self._cache).__name__, len(ids)))
        return whole(self, ids)

    monkeypatch.setattr(asking._Reader, "read", noted)
    comparison(questions, tmp_path, "kvswap", "tokens:64").run()
    lengths = [len(text) for text in TEXTS]
    caches = ("DynamicCache", "KVSwapCache")
    assert read == [(cache, length) for length in lengths for cache in caches]


@needs_native
def test_less_memory_is_measured_and_what_cannot_be_says_why(questions, tmp_path) -> None:
    compared = comparison(
        questions, tmp_path, "kvswap exact", "bytes:1MiB", "bytes:1/5", "tokens:64"
    )
    compared.run()
    found = by_name(results.summarised(compared.results()))
    full, small = found["full"], found["kvswap@bytes:1MiB"]
    for run, size in zip(small["runs"], full["runs"], strict=True):
        assert run["full_bytes"] == size["memory_bytes"] == size["full_bytes"]
        assert 0 < run["memory_bytes"] <= 1 << 20
        assert run["steps"] > 0 and run["ms_per_token"] > 0
    assert found["kvswap@bytes:1/5"]["runs"] == []
    refused = found["kvswap@bytes:1/5"]["impossible"]
    for number, size in enumerate(full["runs"]):
        assert "kv_memory_bytes: must be at least" in refused[str(number)]
        assert f"got {size['full_bytes'] // 5} " in refused[str(number)]
    assert "attends everything" in found["exact@tokens:64"]["impossible"]["1"]


@needs_native
def test_it_goes_on_where_it_was_stopped(questions, tmp_path) -> None:
    first = comparison(questions, tmp_path, "kvswap", "tokens:64")
    assert first.cost().left == first.cost().runs == 4
    seen = []

    def stop(run, done):
        seen.append((run.document, run.name, done))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(stop)
    journal = tmp_path / "out.journal.jsonl"
    before = journal.read_text()
    with journal.open("a") as file:
        file.write('{"setting": "')  # killed in the middle of a line
    second = comparison(questions, tmp_path, "kvswap snapkv", "tokens:64")
    assert (second.cost().left, second.cost().runs) == (4, 6)
    second.run(lambda run, done: seen.append((run.document, run.name, done)))
    assert [each[:2] for each in seen[3:]] == [
        (0, "snapkv"), (1, "full"), (1, "kvswap"), (1, "snapkv"),
    ]  # fmt: skip
    assert journal.read_text().startswith(before) and second.left() == []
    assert [line.seconds for line in [second.cost()]] == [0.0]
    # Judged otherwise, or asked other questions, nothing of it counts.
    assert comparison(questions, tmp_path, "kvswap", "tokens:64", accuracy="exact").cost().left == 4


@needs_native
def test_what_it_costs_is_counted(questions, tmp_path) -> None:
    cost = comparison(questions, tmp_path, "kvswap", "tokens:64", "tokens:128").cost()
    lengths = [len(text) for text in TEXTS]
    assert (cost.documents, cost.questions, cost.tokens) == (2, 4, sum(lengths))
    assert (cost.runs, cost.read_tokens) == (6, 3 * sum(lengths))
    # Each document: /ab= and /xyz= are 9 tokens; answers of 4 and 3, and NEW_TOKENS for each.
    assert cost.steps == 3 * 2 * (9 + 7 + 2 * NEW_TOKENS) and cost.seconds > 0
    assert cost.longest == max(lengths) + 5 + NEW_TOKENS
    shape = 2 * 3 * 2 * 16 * 4  # two sides, layers, KV heads, their width, bytes
    assert cost.disk_bytes == cost.memory_bytes == shape * cost.longest
    told = " ".join(cost_lines(cost, Path("/disk")))
    assert f"4 questions about 2 documents of {sum(lengths)} tokens" in told
    assert "6 runs" in told and "at once in /disk" in told and "--no-full" in told


@needs_native
def test_without_the_full_cache_the_first_method_is_what_others_are_compared_with(
    questions, tmp_path
) -> None:
    compared = comparison(questions, tmp_path, "kvswap snapkv", "tokens:64", is_beside_full=False)
    assert compared.cost().memory_bytes == 0
    compared.run()
    found = results.summarised(compared.results())
    assert found["baseline"] == "kvswap@tokens:64"
    first, second = found["methods"]
    assert first["summary"]["accuracy_difference"] is None
    assert second["summary"]["accuracy_difference"] is not None


@needs_native
def test_a_plug_in_is_a_method(questions, tmp_path) -> None:
    compared = comparison(
        questions, tmp_path,
        "examples.plug_ins.MostSimilarKey:selection.group_tokens=4 "
        "tests.python.test_compare.AllAlike", "tokens:2048",
    )  # fmt: skip
    compared.run()
    _full, similar, ahead = results.summarised(compared.results())["methods"]
    for method in (similar, ahead):
        assert abs(method["summary"]["loss_difference"][0]) < 1e-3


@needs_native
def test_a_document_longer_than_the_model_was_made_for_is_refused(tmp_path) -> None:
    row = {"document": "a" * 600, "question": "b", "answer": "c"}
    with pytest.raises(ConfigError, match=r"document 1 and what follows must be at most the 512"):
        comparison(Questions(lines(tmp_path / "x.jsonl", row)), tmp_path, "kvswap", "tokens:64")


def made_up(name: str, answers: list[list[float]], memory: int, **more: Any) -> dict[str, Any]:
    runs = [
        {"document": number, "tokens": 100, "full_bytes": 1000, "memory_bytes": memory,
         "bytes_read_per_token": None, "ms_per_token": 2.0,
         "answers": [{"accuracy": value, "loss": 1 - value} for value in each]}
        for number, each in enumerate(answers)
    ]  # fmt: skip
    return {"name": name, "budget": None if name == "full" else "tokens:8", "runs": runs} | more


def file_of(*methods: dict[str, Any], **changed: Any) -> dict[str, Any]:
    data = {"name": "x", "digest": "d", "documents": 2, "questions": 3}
    made = {"format": "kvswap-compare", "version": 1, "model": {"name": "m"}, "data": data}
    return made | {"accuracy": "contains", "methods": list(methods)} | changed


def test_differences_are_paired_answer_by_answer() -> None:
    full = made_up("full", [[1, 1], [1]], 1000)
    worse = made_up("quest", [[0, 1], [0]], 250)
    found = results.summarised(file_of(full, worse))
    told = found["methods"][1]["summary"]
    assert found["baseline"] == "full"
    # Drawn again: the first document alone (-1/2), both (-2/3), the second alone (-1).
    assert told["accuracy_difference"] == (-0.66667, -1.0, -0.5)
    assert told["loss_difference"] == (0.66667, 0.5, 1.0)
    assert told["accuracy"] == (0.33333, 0.0, 0.5) and told["memory_share"] == 0.25
    assert told["bytes_read_per_token"] is None and told["ms_per_token"] == 2.0


def test_methods_of_others_join_the_table_and_what_was_asked_otherwise_does_not(tmp_path) -> None:
    theirs = tmp_path / "theirs.json"
    results.write(theirs, file_of(made_up("theirs", [[1, 0], [1]], 500), made_up("full", [], 0)))
    ours = file_of(made_up("full", [[1, 1], [1]], 1000))
    joined = results.summarised(results.added(ours, results.read(theirs), str(theirs)))
    assert [method["name"] for method in joined["methods"]] == ["full", "theirs"]
    assert joined["methods"][1]["summary"]["accuracy_difference"][0] == -0.33333
    for changed, told in (
        ({"data": {"digest": "e"}}, "must have data.digest d, .*has e"),
        ({"accuracy": "exact"}, "must have accuracy contains, .*has exact"),
    ):
        with pytest.raises(ConfigError, match=told):
            results.added(ours, file_of(**changed), "x.json")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "must be results of kvswap compare"),
        ("[]", "must have format, .*lacks format"),
        (json.dumps(file_of(version=2)), "must be of format kvswap-compare 1, is kvswap-compare 2"),
        (json.dumps(file_of({"name": "a", "budget": None})), r"methods\[0\] must have.*lacks runs"),
        (
            json.dumps(file_of({"name": "a", "budget": None, "runs": [{"document": 0}]})),
            r"methods\[0\].runs\[0\] must have .*lacks tokens",
        ),
    ],
)
def test_a_file_that_is_none_is_refused(text, told, tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        results.read(path)


@needs_native
def test_the_command_writes_table_plot_and_results_and_says_first_what_it_costs(
    tiny_model_dir, tmp_path
) -> None:
    data = lines(
        tmp_path / "x.jsonl",
        *(
            {"document": f"{name} " * 60, "question": "who?", "answer": name}
            for name in ("ann", "bob")
        ),
    )
    out = tmp_path / "out.json"
    command = ["compare", "--model", str(tiny_model_dir), "--data", str(data), "--methods",
               "kvswap,snapkv", "--budget", "tokens:64", "--out", str(out), "--path",
               str(tmp_path), "--max-new-tokens", "4", "--dtype", "float32"]  # fmt: skip
    done = CliRunner().invoke(app, [*command, "--dry-run"])
    assert done.exit_code == 0 and "6 runs" in done.output and not out.exists()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    said = done.output
    assert said.index("6 runs") < said.index("run 1 of 6") < said.index("ms/token")
    found = json.loads(out.read_text())
    assert [results.label(each) for each in found["methods"]] == [
        "full", "kvswap@tokens:64", "snapkv@tokens:64",
    ]  # fmt: skip
    assert found["machine"]["versions"]["torch"] and found["baseline"] == "full"
    assert found["model"]["name"] == tiny_model_dir.name  # no folders of this machine
    assert results.read(out) == found
    ElementTree.parse(out.with_suffix(".svg"))
    again = CliRunner().invoke(app, command)
    assert "all 6 runs done before" in again.output and "run 1 of" not in again.output
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"x.jsonl", "out.json", "out.svg", "out.journal.jsonl"}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--methods", ","], "--methods: must have a name"),
        (["--budget", "1024"], "--budget: must be tokens:N"),
        (["--out", "x.csv"], "--out: must end with .json"),
        (["--out", "/nope/x.json"], "--out: its folder must exist"),
        (["--path", "/nope"], "--path: must be a directory"),
        (["--data", "/nope"], "--data: must be a file of JSON lines"),
        (["--add", "/nope"], "--add: must be results"),
        (["--tasks", "needle"], "compare: must have either --data or --tasks, got both"),
    ],
)
def test_what_can_be_refused_is_refused_before_a_model_is_loaded(changed, told, tmp_path) -> None:
    data = lines(tmp_path / "x.jsonl", {"document": "a", "question": "b", "answer": "c"})
    command = ["compare", "--model", "/no/model", "--data", str(data), "--out",
               str(tmp_path / "o.json"), *changed]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, ConfigError) and str(done.exception).startswith(told)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "compare: must have either --data or --tasks, got neither"),
        (["--tasks", "needles"], "--tasks: must be all or among needle, .*got needles"),
        (["--tasks", ","], "--tasks: must be all or among needle, .*got none"),
    ],
)
def test_tasks_are_refused_before_a_model_is_loaded(given, told, tmp_path) -> None:
    command = ["compare", "--model", "/no/model", "--out", str(tmp_path / "o.json"), *given]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, ConfigError) and re.match(told, str(done.exception))
    assert list(tmp_path.iterdir()) == []


def test_the_page_has_every_field_of_the_results() -> None:
    page = (ROOT / "docs" / "how-to" / "compare.md").read_text(encoding="utf-8")
    fields = set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))
    runs = {f"methods[].runs[].{name}" for name in (*results.RUN, "steps")}
    answers = {f"methods[].runs[].answers[].{name}" for name in results.ANSWER}
    assert runs - {"methods[].runs[].answers"} | answers <= fields
    assert {"format", "version", "data.digest", "accuracy", "methods[].name"} <= fields


def test_what_a_budget_asked_for_is_told_with_its_documents() -> None:
    rank = {"summary.rank": 4}
    runs = [{"smaller": rank}, {}, {"smaller": rank}, {"smaller": rank | {"summary.kind": "mean"}}]
    told = smaller_settings({"runs": [*runs, {"smaller": ["of others"]}]})
    assert told == {"summary.rank=4": 2, "summary.rank=4, summary.kind=mean": 1}


def test_what_did_not_fit_by_an_older_rule_is_left_to_do(tmp_path) -> None:
    path, names = tmp_path / "a.jsonl", {"length": 9, "document": 0, "method": "quest"}
    Journal(path).add(names | {"impossible": "too small"})
    assert Journal(path).has(9, 0, "quest")
    path.write_text(json.dumps(names | {"impossible": "too small"}) + "\n", encoding="utf-8")
    journal = Journal(path)
    assert not journal.has(9, 0, "quest")
    journal.add(names | {"answers": []})
    assert journal.has(9, 0, "quest") and Journal(path).has(9, 0, "quest")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_cache_on_the_cpu_would_share_its_pages(monkeypatch, device):
    asked: dict[str, bool] = {}

    def fit(request, shape, config, need, **how):
        asked.update(how)
        return config

    monkeypatch.setattr(compare_budget, "fit_budget", fit)
    need = SimpleNamespace(search=lambda settled: settled())
    monkeypatch.setattr(compare_budget.Bytes, "_need", lambda *given: need)
    shape = ModelShape(layers=4, heads=8, kv_heads=2, head_dim=16, element_bytes=2)
    parts = SimpleNamespace(device=torch.device(device), shape=shape)
    compare_budget.Bytes(parts, 100).fitted(SwapConfig(), 1 << 20)
    assert asked["may_share"] is (device == "cpu")
