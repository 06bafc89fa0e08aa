"""Where a document comes from, what its saved cache tells of it, and what a shell completes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvswap_torch.cli.app import app
from kvswap_torch.cli.completion import preset_names, saved_caches
from kvswap_torch.cli.document import document_text
from kvswap_torch.errors import ConfigError
from kvswap_torch.preset import presets
from kvswap_torch.version import __version__
from tests.first_hour.pdf import book_pdf, pdf
from tests.python.tiny_models import has_native


def kvswap(*words: Any, typed: str | bytes = "") -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], typed, catch_exceptions=True)


def test_a_pdf_without_what_reads_it_is_said_with_both_ways_out(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    book = tmp_path / "book.pdf"
    book.write_bytes(pdf("The colour is blue."))
    with pytest.raises(ConfigError) as refused:
        document_text(book)
    told = str(refused.value)
    assert f"{book} is a PDF" in told and f"pdftotext {book} - | kvswap ingest -" in told
    assert "pip install 'kvswap_torch[pdf]'" in told


def fake_pypdf(monkeypatch: pytest.MonkeyPatch, pages: list[str] | Exception) -> None:
    class PyPdfError(Exception): ...

    class PdfReader:
        def __init__(self, content: io.BytesIO):
            assert content.read().startswith(b"%PDF-")
            if isinstance(pages, Exception):
                raise pages
            self.pages = [
                types.SimpleNamespace(extract_text=lambda text=text: text) for text in pages
            ]

    errors = types.SimpleNamespace(PyPdfError=PyPdfError)
    monkeypatch.setitem(
        sys.modules, "pypdf", types.SimpleNamespace(PdfReader=PdfReader, errors=errors)
    )
    monkeypatch.setitem(sys.modules, "pypdf.errors", errors)


@pytest.mark.parametrize(
    ("pages", "told"),
    [
        (["", " \n"], "its 2 pages are pictures"),
        (ValueError("no xref"), "is none: no xref; convert it"),
    ],
    ids=["pictures", "damaged"],
)
def test_a_pdf_without_text_is_refused(pages, told, monkeypatch, tmp_path) -> None:
    fake_pypdf(monkeypatch, pages)
    book = tmp_path / "book.pdf"
    book.write_bytes(pdf(""))
    with pytest.raises(ConfigError, match=told):
        document_text(book)


def test_pages_of_a_pdf_follow_one_another(monkeypatch, tmp_path) -> None:
    fake_pypdf(monkeypatch, ["The colour is blue. ", "", "The number is nine."])
    book = tmp_path / "book.pdf"
    book.write_bytes(pdf(""))
    assert document_text(book) == "The colour is blue.\n\nThe number is nine."


def test_pypdf_itself_reads_pages_and_lines(tmp_path) -> None:
    pytest.importorskip("pypdf")
    book = tmp_path / "book.pdf"
    book.write_bytes(pdf("The colour is blue.\nSo (it) says \\ here.", "", "The number is nine."))
    assert document_text(book) == (
        "The colour is blue.\nSo (it) says \\ here.\n\nThe number is nine."
    )
    lines = [f"Line {number} of the book." for number in range(120)]
    book.write_bytes(book_pdf("\n".join(lines)))
    text = document_text(book)
    assert [line for line in text.splitlines() if line] == lines
    assert text.count("\n\n") == 2, "three pages"


@pytest.mark.parametrize(
    ("content", "told"),
    [(pdf("", ""), "its 2 pages are pictures"), (b"%PDF-1.4\nnothing", "is none: .*; convert it")],
    ids=["pictures", "damaged"],
)
def test_pypdf_itself_finds_no_text(content, told, tmp_path) -> None:
    pytest.importorskip("pypdf")
    book = tmp_path / "book.pdf"
    book.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        document_text(book)


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_a_pdf_is_ingested_by_its_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    given, text = tmp_path / "book.pdf", "The colour of the house is blue.\n" * 8
    given.write_bytes(book_pdf(text))
    (tmp_path / "book.txt").write_text(text.rstrip())
    tokens = []
    for name in ("book.pdf", "book.txt"):
        out = tmp_path / f"{name}.kvswap"
        words = ["ingest", tmp_path / name, "--model", tiny_model_dir, "-o", out]
        done = kvswap(*words, "--path", tmp_path)
        assert done.exit_code == 0, done.output
        told = json.loads(kvswap("show", out, "--json").output)
        assert told["facts"]["document"] == str(tmp_path / name)
        tokens.append(told["tokens"])
    assert tokens[0] == tokens[1] > 8


def test_what_is_no_text_is_said(tmp_path) -> None:
    picture = tmp_path / "book.txt"
    picture.write_bytes(zlib.compress(b"x" * 1000) + b"\xff\xfe")
    with pytest.raises(ConfigError, match="must be readable UTF-8 text"):
        document_text(picture)
    with pytest.raises(ConfigError, match="No such file"):
        document_text(tmp_path / "nothing.txt")


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_a_text_that_is_piped_in_is_ingested_and_shown(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    book = tmp_path / "book.kvswap"
    words = ["ingest", "-", "--model", tiny_model_dir, "-o", book, "--path", tmp_path]
    done = kvswap(*words, typed=b"The colour of the house is blue. " * 8)
    assert done.exit_code == 0, done.output
    shown = kvswap("show", book).output
    assert "document" in shown and " -\n" in shown and "the defaults" in shown
    from datetime import datetime

    assert f"{datetime.now():%Y-%m-%d}" in shown


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_ingest_takes_a_preset_and_show_says_its_settings(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    document, book = tmp_path / "book.txt", tmp_path / "book.kvswap"
    document.write_text("The colour of the house is blue. " * 8)
    words = ["ingest", document, "--model", tiny_model_dir, "-o", book, "--path", tmp_path]
    done = kvswap(*words, "--preset", "quest")
    assert done.exit_code == 0, done.output
    shown = kvswap("show", book).output
    assert str(document) in shown and "summary.kind=min_max" in shown
    told = json.loads(kvswap("show", book, "--json").output)
    assert told["facts"]["document"] == str(document)
    # It is kept by who opens it and saves it again.
    again = tmp_path / "again.kvswap"
    code = (
        "import sys; from kvswap_torch import KVSwapCache; from transformers import "
        "AutoModelForCausalLM as M; m = M.from_pretrained(sys.argv[1])\n"
        "with KVSwapCache.open(m, sys.argv[2], path=sys.argv[4]) as cache: cache.save(sys.argv[3])"
    )
    subprocess.run(
        [sys.executable, "-c", code, tiny_model_dir, book, again, tmp_path], check=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert json.loads(kvswap("show", again, "--json").output)["facts"]["document"] == str(document)


def test_a_preset_that_nobody_knows_is_refused_before_a_model_is_loaded(
    monkeypatch, tmp_path
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvswap_torch.cli.generate.load_model", never)
    document = tmp_path / "book.txt"
    document.write_text("blue")
    words = ["ingest", document, "--model", "DIR", "-o", tmp_path / "b.kvswap"]
    words += ["--preset", "nothing"]
    done = kvswap(*words)
    assert isinstance(done.exception, ConfigError)
    assert "nothing" in str(done.exception)


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_a_folder_that_is_not_there_is_refused_before_a_model_is_loaded(
    command, monkeypatch, tmp_path
) -> None:
    words = [command, tmp_path / "book.kvswap", "--path", tmp_path / "nowhere"]
    done = kvswap(*words, *(["--question", "who?"] if command == "ask" else []))
    assert isinstance(done.exception, ConfigError)
    assert "--path: must be a directory on the disk to use" in str(done.exception)


def test_the_version_is_said() -> None:
    done = kvswap("--version")
    assert done.exit_code == 0 and done.output == f"kvswap_torch {__version__}\n"


def test_presets_and_saved_caches_are_completed(monkeypatch, tmp_path) -> None:
    assert preset_names("") == sorted(each.name for each in presets())
    assert "quest" in preset_names("que") and preset_names("nothing") == []
    for name in ("book.kvswap", "booth", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "book.kvswap" / "manifest.json").touch()
    (tmp_path / "book.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert saved_caches("bo") == ["book.kvswap", "booth/"]
    assert saved_caches("") == ["book.kvswap", "booth/"]
    assert saved_caches(f"{tmp_path}/book") == [f"{tmp_path}/book.kvswap"]
    assert saved_caches("nowhere/x") == []


def test_a_shell_gets_them() -> None:
    """As bash asks, by the words that typer's own script sets."""
    environment = {"_KVSWAP_COMPLETE": "complete_bash", "COMP_CWORD": "3",
                   "COMP_WORDS": "kvswap generate --preset que"}  # fmt: skip
    done = CliRunner().invoke(app, [], prog_name="kvswap", env=environment)
    assert "quest" in done.output.split()
