"""The server's page: what it asks of the server, and, where there is a browser, what it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvswap_torch import KVSwapCache
from kvswap_torch.hf.serving.page import FILES, beginning, file_of
from tests.python.serving_process import Served, ended_well, make_model, served_model
from tests.python.test_serving import document, send
from tests.python.tiny_models import COVERING, has_native

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
parent = pytest.fixture(served_model, scope="module", name="parent")
served = pytest.fixture(ended_well, name="served")
BROWSER = os.environ.get("KVSWAP_TEST_BROWSER") or shutil.which("chromium")


def ingest(served: Served, text: str, **headers: str) -> list[dict[str, Any]]:
    status, told = send(served, "POST", "/v1/kvswap/ingest", {"text": text}, headers)
    assert status == 200, told
    return [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]


def test_its_files_ask_nobody_else() -> None:
    for path in FILES:
        text, _ = file_of(path)
        assert not re.search(r"https?://|//[a-z]+\.|@import|innerHTML|eval\(", text), path
    page, _ = file_of("/")
    assert re.findall(r'(?:src|href)="([^"]+)"', page) == ["page.css", "data:,", "page.js"]
    assert "<script>" not in page and "style=" not in page and "onclick" not in page


def test_the_page_is_there_and_can_be_left_out(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path))
    status, told = send(served, "GET", "/", None)
    assert status == 200 and "<title>kvswap serve</title>" in told
    assert send(served, "GET", "/page.js", None)[0] == send(served, "GET", "/page.css", None)[0]
    assert send(served, "GET", "/", None, {"Host": "evil.example"})[0] == 403
    assert served.end() == 0
    served.start(store=str(tmp_path), has_page=False)
    for path in ("/", "/page.js", "/v1/kvswap/documents"):
        assert send(served, "GET", path, None)[0] == 404
    assert send(served, "POST", "/v1/kvswap/ingest", {"text": "x"})[0] == 404


def test_a_document_is_read_with_its_progress_and_asked_about(
    served: Served, tmp_path: Path
) -> None:
    served.start(store=str(tmp_path), prefill_chunk=64)
    book = document(1, 300)
    events = ingest(served, book)
    read = [each["read"] for each in events]
    assert read == sorted(read) and read[-1] == 301 and len(read) > 5
    assert {each["of"] for each in events} == {301}
    (listed,) = json.loads(served.get("/v1/kvswap/documents"))["documents"]
    assert (listed["name"], listed["tokens"]) == (events[-1]["name"], 301)
    assert listed["document"] == "" and listed["begins"] == beginning(book)
    assert listed["bytes"] > 0 and abs(listed["used"] - time.time()) < 3600
    told = json.loads(served.get(f"/v1/kvswap/documents/{listed['name']}"))
    assert told["text"] == book
    body = {
        "messages": [{"role": "user", "content": f"{book}who?"}],
        "max_tokens": 2,
        "temperature": 0,
    }
    _, told = send(served, "POST", "/v1/chat/completions", body)
    assert json.loads(told)["usage"]["prompt_tokens_details"]["cached_tokens"] == 301
    assert ingest(served, book)[-1]["cached"] >= 300, "the second time there is nothing to read"
    short = ingest(served, "ab")  # shorter than what an answer would have saved
    assert short[-1]["name"] and len(list(tmp_path.glob("*.kvswap"))) == 2
    assert send(served, "GET", "/v1/kvswap/documents/nothing", None)[0] == 404


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("A house.\n\n  It is blue.", "A house. It is blue."),
        ("word " * 30, "word word word word word word word word word word word word ..."),
        ("words " * 30, "words words words words words words words words words words ..."),
        ("x" * 200, "x" * 60 + " ..."),
        ("cut \ufffd", "cut"),
        ("# A house\n=========\n\n- blue", "A house blue"),
        ("=== ***", "=== ***"),
        ("", ""),
    ],
    ids=[
        "short",
        "words",
        "within a word",
        "no spaces",
        "half a character",
        "rules",
        "no letters",
        "nothing",
    ],
)
def test_a_document_is_listed_by_how_it_begins(text: str, begins: str) -> None:
    assert beginning(text) == begins


def test_a_document_that_was_ingested_before_has_its_files_name(
    served: Served, tmp_path: Path
) -> None:
    model, tokenizer = make_model(tmp_path / "model")
    store = tmp_path / "store"
    store.mkdir()
    for document_name, saved in (("books/war.txt", "one.kvswap"), ("-", "two.kvswap")):
        ids = tokenizer(f"<{document(1, 100)}{saved}", return_tensors="pt")["input_ids"]
        with KVSwapCache(model, path=tmp_path, config=COVERING) as cache:
            model.generate(ids, **cache.as_argument(), max_new_tokens=1, do_sample=False)
            cache.document = str(tmp_path / document_name) if document_name != "-" else "-"
            cache.save(store / saved)
    served.start(store=str(store))
    told = json.loads(served.get("/v1/kvswap/documents"))["documents"]
    assert {each["name"]: each["document"] for each in told} == {
        "one.kvswap": "war.txt",
        "two.kvswap": "",
    }
    assert all(each["begins"] == beginning(document(1, 100)) for each in told)
    assert str(tmp_path) not in json.dumps(told), "folders of the server are its own"
    longer = {"prompt": f"<{document(1, 100)}one.kvswap{document(2, 100)}", "max_tokens": 1}
    _, answered = send(served, "POST", "/v1/completions", longer)
    assert json.loads(answered)["usage"]["prompt_tokens_details"]["cached_tokens"] == 111
    end = time.monotonic() + 60
    while len(told) < 3 and time.monotonic() < end:  # it is saved after the answer
        told = json.loads(served.get("/v1/kvswap/documents"))["documents"]
    assert sorted(each["document"] for each in told) == ["", "", "war.txt"], "it is another text"


def test_a_document_that_is_none_is_refused(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), max_context=400)
    for body, words in (
        ({"text": "x" * 400}, "shorter than 400 tokens"),
        ({"text": ""}, "the document"),
        ({"text": 5}, "text must be a text"),
        ({"texts": "x"}, "texts must be left out"),
        ([], "the document"),
    ):
        status, told = send(served, "POST", "/v1/kvswap/ingest", body)
        assert (status, words in told) == (400, True), told


def test_each_key_has_documents_of_its_own(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), keys=["one", "two"])
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    name = ingest(served, document(1), **one)[-1]["name"]
    assert send(served, "GET", "/", None)[0] == 200, "it says nothing of what is served"
    for path in ("/v1/kvswap/documents", f"/v1/kvswap/documents/{name}"):
        assert send(served, "GET", path, None)[0] == 401
        assert name in send(served, "GET", path, None, one)[1]
    assert json.loads(send(served, "GET", "/v1/kvswap/documents", None, two)[1])["documents"] == []
    assert send(served, "GET", f"/v1/kvswap/documents/{name}", None, two)[0] == 404
    assert send(served, "POST", "/v1/kvswap/ingest", {"text": "x"})[0] == 401


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_in_a_browser(served: Served, tmp_path: Path) -> None:
    """A file is read, a question asked, the gauges move; a screenshot where it is wanted."""
    python = os.environ.get("KVSWAP_TEST_PLAYWRIGHT", "python3")
    if subprocess.run([python, "-c", "import playwright"], capture_output=True).returncode:
        pytest.skip("there is no playwright")
    served.start(store=str(tmp_path / "store"), keys=["the-key"])
    book = tmp_path / "book.txt"
    book.write_text(document(1, 300))
    script = Path(__file__).with_name("page_in_a_browser.py")
    done = subprocess.run(
        [python, script, BROWSER, served.address, book],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "301 tokens" in told["bar"] and told["documents"] == 1
    assert told["answer"] and "(98 %) from a cache" in told["reused"]
    begins = beginning(document(1, 300))
    assert told["first"].startswith(begins) and told["first"].endswith(".kvswap")
    assert told["chosen"] == f"{begins}, 301 tokens"
    assert told["head_lines"] == [1, 1, 1, 1], "a word of a head must not be broken"
    assert told["errors"] == [] and int(told["hits"]) >= 1
