"""The commands over saved documents, and ``generate --save`` and ``--open``."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvswap_torch import ConfigError, KVSwapError, SwapConfig
from kvswap_torch.cli import chat as chat_module
from kvswap_torch.cli.app import app
from kvswap_torch.cli.chat import Chat
from kvswap_torch.cli.generate import GenerateOptions
from kvswap_torch.cli.saved import opened
from kvswap_torch.config import Summary, UserRetention
from kvswap_torch.hf.saving import _found_anywhere
from kvswap_torch.saved_path import named
from tests.python import every_model
from tests.python.test_cli import QUESTIONS, document
from tests.python.tiny_models import character_tokenizer, has_native, tiny_model

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
__all__ = ["document"]  # a fixture
LENGTH = ["--max-new-tokens", "4"]


def kvswap(*words: Any, typed: str | bytes = "") -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], typed, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def asked(questions: list[str]) -> list[str]:
    return [word for question in questions for word in ("--question", question)]


def test_a_document_is_read_once(tiny_model_dir: Path, document: Path, tmp_path: Path) -> None:
    book, disk = tmp_path / "book.kvswap", ["--path", tmp_path]
    told = kvswap("ingest", document, "--model", tiny_model_dir, "-o", book, "--json", *disk)
    assert json.loads(told)["tokens"] == len(document.read_text())
    assert json.loads(kvswap("show", book, "--json"))["facts"]["name"] == str(tiny_model_dir)
    assert "whole" in kvswap("verify", book)
    answers = json.loads(kvswap("ask", book, *asked(QUESTIONS), *LENGTH, *disk, "--json"))
    alone = json.loads(kvswap("ask", book, *asked(QUESTIONS[1:]), *LENGTH, *disk, "--json"))
    assert [answer["question"] for answer in answers] == QUESTIONS
    assert alone[0]["answer"] == answers[1]["answer"], "each begins at the document's end"
    typed = f"{QUESTIONS[1]}\n/back\n{QUESTIONS[0]}\n/stats\n/what\n\n/ask {QUESTIONS[1]}\n"
    turns = json.loads(kvswap("chat", book, *LENGTH, *disk, "--json", typed=typed))
    assert [turn["answer"] for turn in turns] == [answers[1]["answer"]]
    kvswap("rm", book)
    assert list(tmp_path.iterdir()) == [document]
    with pytest.raises(KVSwapError, match="must be there"):
        kvswap("rm", book)


def test_a_target_that_cannot_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    asked = SwapConfig(summary=Summary(kind="none"), retention=UserRetention())
    asked.save(tmp_path / "keeps.json")
    (tmp_path / "taken").mkdir()
    for output, more, told in (
        ("taken", [], "--output: .*taken must not exist, .* or give --overwrite"),
        ("taken", ["--overwrite"], "--output: .*taken must be the folder of a saved cache"),
        ("no/book", [], "--output: its parent must be a folder"),
        ("x" * 250, [], "--output: its parent .*File name too long"),
        (
            "book",
            ["--config", tmp_path / "keeps.json"],
            "--config: retention.policy must not be user",
        ),
    ):
        words = ["ingest", "nowhere.txt", "--model", "nowhere", "-o", tmp_path / output, *more]
        with pytest.raises(ConfigError, match=told):
            kvswap(*words)
    with pytest.raises(ConfigError, match=r"--output: \. must not exist"):
        kvswap("ingest", "nowhere.txt", "--model", "nowhere", "-o", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keeps.json", "taken"]


def test_a_document_longer_than_the_model_was_made_for(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("x" * 4097)
    with pytest.raises(ConfigError, match="at most the 4,096 tokens .* come to 4,097; shorten it"):
        kvswap("ingest", tmp_path / "long.txt", "--model", tiny_model_dir, "-o", tmp_path / "book")
    assert not (tmp_path / "book").exists()


def test_a_saved_cache_and_its_model_are_found_from_anywhere(
    tiny_model_dir: Path, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.kvswap"
    monkeypatch.chdir(tiny_model_dir.parent)
    kvswap("ingest", document, "--model", tiny_model_dir.name, "-o", book, "--path", tmp_path)
    monkeypatch.chdir(book)
    assert json.loads(kvswap("show", ".", "--json"))["facts"]["name"] == str(tiny_model_dir)
    assert "whole" in kvswap("verify", "./")
    kvswap("ask", ".", *asked(QUESTIONS[:1]), *LENGTH, "--path", "..")
    kvswap("rm", ".")
    monkeypatch.chdir(tmp_path)
    assert not book.exists()
    with pytest.raises(KVSwapError, match="records.bin must be there"):
        kvswap("ask", "", *asked(QUESTIONS))
    with pytest.raises(ValueError, match="path: must be UTF-8"):
        kvswap("show", "\udcff")
    assert named("a/b.kvswap/") == "a/b.kvswap/" and named("") == ""
    assert named("..") == str(tmp_path.parent)
    assert _found_anywhere("org/model") == "org/model" and _found_anywhere("") == ""


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[Any], None]]:
    """What SIGINT does, as in a terminal whoever began the tests; a test may set another."""

    def does(handler: Any) -> None:
        signal.signal(signal.SIGINT, handler)

    before = signal.getsignal(signal.SIGINT)
    does(signal.default_int_handler)
    yield does
    does(before)


def test_layers_that_cannot_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, ctrl_c: Any
) -> None:
    """A window of six tokens: `ask` opens the document anew, a chat says so and goes on."""
    model, document, book = (tmp_path / name for name in ("gemma", "a.txt", "book.kvswap"))
    tiny_model("gemma3").save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    document.write_text("Thecolourisblue,thenumberisnine." * 4, encoding="utf-8")
    usual = ["--path", tmp_path, "--prompt-template", "{document}{question}"]
    kvswap("ingest", document, "--model", model, "-o", book, *usual)
    usual += LENGTH
    answers = json.loads(kvswap("ask", book, *asked(["one", "two"]), *usual, "--json"))
    alone = json.loads(kvswap("ask", book, *asked(["two"]), *usual, "--json"))
    assert [answer["question"] for answer in answers] == ["one", "two"]
    assert answers[1]["answer"] == alone[0]["answer"]
    told = kvswap("chat", book, *usual, typed=b"one\n/back\n/ask two\n\xff\ntwo\n")
    assert told.count("error: going back: every layer must keep what is past") == 2
    assert "error: question: must be UTF-8 text, got '\\udcff'" in told
    compared = ["--compare", "--json", tmp_path / "out.json"]
    kvswap("generate", "--model", model, "--document", document, *asked(["a"]), *usual, *compared)
    scores = json.loads((tmp_path / "out.json").read_text())["agreements"][0]
    assert scores["log_likelihood_in_memory"] is scores["log_likelihood_on_disk"] is None

    options = GenerateOptions("", book, (), path=tmp_path, prompt_template=usual[3])
    shown = Console(file=io.StringIO(), width=200)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with opened(book, None, options, shown) as conversation:
        chat = Chat(conversation, 4, shown)
        with monkeypatch.context() as during:
            during.setattr(chat_module, "writer", lambda console: interrupted)
            chat.answer("one")
        assert conversation.ids == conversation.cache.token_ids[0].tolist()
        assert conversation.turns[0].question == "one"
        chat.answer("two")
        assert [turn.question for turn in conversation.turns] == ["one", "two"]
        assert conversation.turns[1].answer_tokens == 4

        # Ctrl-C in the middle of a pass, when some layers have read what others have not.
        middle = conversation.model.model.layers[1]
        hook = middle.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        chat.answer("three")
        hook.remove()
        assert conversation.ids == conversation.cache.token_ids[0].tolist()
        chat.answer("four")
        assert [turn.question for turn in conversation.turns] == ["one", "two", "three", "four"]
        assert conversation.turns[3].answer_tokens == 4
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_sigint_is_ignored_ctrl_c_has_no_effect_and_chat_says_so(
    tiny_model_dir: Path, document: Path, tmp_path: Path, ctrl_c: Any
) -> None:
    """As after `nohup`; a chat does not listen to what its parent had it ignore."""
    book, disk = tmp_path / "book.kvswap", ["--path", tmp_path]
    kvswap("ingest", document, "--model", tiny_model_dir, "-o", book, *disk)
    shown = Console(file=io.StringIO(), width=200)
    options = GenerateOptions("", book, (), path=tmp_path)
    with opened(book, None, options, shown) as conversation:
        chat = Chat(conversation, 4, shown)
        layer = conversation.model.model.layers[1]
        hook = layer.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        ctrl_c(signal.SIG_IGN)
        chat.answer(QUESTIONS[0])
        assert conversation.turns[0].answer_tokens == 4
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        chat.answer("/help")
        assert "Ctrl-C has no effect" in shown.file.getvalue()
        ctrl_c(signal.default_int_handler)
        chat.answer(QUESTIONS[1])
        hook.remove()
        assert len(conversation.turns) == 1, "heard at once, the second time at the latest"
        chat.answer("/help")
        assert "Ctrl-C ends an answer" in shown.file.getvalue()
    assert "nohup" in kvswap("--help")


def test_generate_saves_and_goes_on(tiny_model_dir: Path, document: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.kvswap"
    common = ["--model", tiny_model_dir, *asked(QUESTIONS), *LENGTH, "--path", tmp_path]
    out = tmp_path / "out.json"

    def turns(*words: Any) -> list[list[int]]:
        kvswap("generate", *common, *words, "--json", out)
        return [turn["answer_ids"] for turn in json.loads(out.read_text())["disk"]["turns"]]

    read = turns("--document", document, "--save", book)
    assert turns("--open", book) == read
    assert json.loads(out.read_text())["disk"]["prefill_tokens"] == 0
    assert turns("--open", book, "--document", document, "--compare") == read
    assert json.loads(out.read_text())["answers_equal"] is True
    for words, told in (
        (["--open", book, "--rows", "box"], "--rows: must be left out with --open"),
        ([], "--document: must be given, or --open"),
    ):
        with pytest.raises(ConfigError, match=told):
            turns(*words)
    document.write_text(document.read_text()[:-1])
    with pytest.raises(ConfigError, match="must be what was saved in"):
        turns("--open", book, "--document", document)


def test_what_can_be_typed_in_a_chat(
    tiny_model_dir: Path, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.kvswap"
    kvswap("ingest", document, "--model", tiny_model_dir, "-o", book, "--path", tmp_path)
    options = GenerateOptions(model="", document=book, questions=(), path=tmp_path)
    shown = Console(file=io.StringIO(), width=200)
    with opened(book, None, options, shown) as conversation:
        chat = Chat(conversation, 4, shown)
        begin = list(conversation.ids)
        chat.answer(QUESTIONS[0])
        first, alone = list(conversation.ids), conversation.turns[0].answer_ids
        chat.answer(QUESTIONS[1])
        assert len(conversation.turns) == 2 and len(conversation.ids) > len(first)
        second = conversation.turns[1].answer_ids
        chat.answer("/back")
        assert conversation.ids == first and len(conversation.turns) == 1
        assert conversation.cache.get_seq_length() <= len(first)
        chat.answer(QUESTIONS[1])
        assert conversation.turns[1].answer_ids == second, "as it was before it was taken back"
        chat.answer(f"/ask {QUESTIONS[0]}")
        assert [turn.answer_ids for turn in conversation.turns] == [alone]
        for _ in range(3):
            chat.answer("/back")
        assert conversation.ids == begin and conversation.turns == []
        assert conversation.cache.get_seq_length() == len(begin)
        chat.answer("/stats")
        assert "KV on disk" in shown.file.getvalue()
        chat.answer("/nonsense")
        assert "forget the last turn" in shown.file.getvalue()

        def interrupted(question: str, *_: Any) -> None:
            conversation.ids.extend([1, 2, 3])
            raise KeyboardInterrupt

        with monkeypatch.context() as during:
            during.setattr(conversation, "ask", interrupted)
            chat.answer(QUESTIONS[0])
        assert conversation.ids == begin
        chat.answer(QUESTIONS[0])
        assert conversation.turns[0].answer_ids == alone


def test_a_document_has_the_settings_of_its_length(tiny_model_dir: Path, tmp_path: Path) -> None:
    """They do not follow from the first chunk, and leave room for questions."""
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("The colour of the house is blue, the number is nine. " * 66)
    short.write_text("The colour of the house is blue. " * 45)
    usual = ["--path", tmp_path, "--kv-memory", "1MiB"]
    for each in (long, short):
        book, read = tmp_path / each.stem, ["--prefill-chunk", "64"] * (each == long)
        kvswap("ingest", each, "--model", tiny_model_dir, "-o", book, *usual, *read)
        kvswap("ask", book, *asked(["?" * 100] * 2), "--max-new-tokens", "60", *usual)


def test_a_saved_cache_is_asked_in_its_own_precision(tiny_model_dir: Path, tmp_path: Path) -> None:
    document, book = tmp_path / "a.txt", tmp_path / "book"
    document.write_text("The colour of the house is blue. " * 6)
    usual = ["--path", tmp_path, *LENGTH]
    saving = ["generate", "--model", tiny_model_dir, "--document", document, "--question", "?"]
    kvswap(*saving, "--dtype", "bfloat16", "--save", book, *usual)
    assert json.loads(kvswap("show", book, "--json"))["facts"]["model"]["dtype"] == "bfloat16"
    assert json.loads(kvswap("ask", book, "--question", "?", *usual, "--json"))[0]["answer"]


def test_recurrent_models_read_a_document_and_answer(tmp_path: Path, one_thread: None) -> None:
    model, document = tmp_path / "model", tmp_path / "a.txt"
    every_model.build("Qwen3Next").save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    document.write_text("Thecolourisblue,thenumberisnine." * 3)
    words = ["--model", model, "--document", document, "--question", "what", "--path", tmp_path]
    words += ["--prompt-template", "{document}{question}", "--compare", *LENGTH]
    told = kvswap("generate", *words, "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["answers_equal"] is True, told


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_closed_stdin_is_said(tiny_model_dir: Path, tmp_path: Path, command: str) -> None:
    document, book = tmp_path / "a.txt", tmp_path / "book"
    document.write_text("The colour of the house is blue. " * 6)
    kvswap("ingest", document, "--model", tiny_model_dir, "-o", book, "--path", tmp_path)
    words = {
        "generate": ["--model", tiny_model_dir, "--document", "-", "--question", "?"],
        "chat": [book],
    }[command]
    done = subprocess.run(
        ["bash", "-c", '"$@" <&-', "-", sys.executable, "-m", "kvswap_torch", command, *words],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and "stdin" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
