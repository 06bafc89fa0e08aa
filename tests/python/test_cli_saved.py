"""The commands over saved documents, and ``generate --save`` and ``--open``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvswap_torch import ConfigError, KVSwapError
from kvswap_torch.cli.app import app
from tests.python.tiny_models import has_native

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
QUESTIONS = ["What is the colour?", "And the number?"]
LENGTH = ["--max-new-tokens", "4"]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text("The colour of the house is blue, the number is nine. " * 6, encoding="utf-8")
    return path


def kvswap(*words: Any, typed: str = "") -> str:
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
