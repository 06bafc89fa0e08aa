"""Each page's commands, typed in order in a folder with what the page takes for granted.

``KVSWAP_TEST_LONG=1`` (`make test-long`) types those of `docs_pages.LONG`, too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.first_hour.users import ANSWER
from tests.packaging.run_docs import OWN_MODEL, PAGES, Block, blocks, commands
from tests.python.docs_pages import (
    LONG,
    LONG_PAGES,
    NOT_TYPED,
    SHOWN,
    is_shown,
    pages_to_type,
    typed,
)
from tests.python.docs_reader import GGUF, STANDS_FOR, Reader, prepare
from tests.python.gguf_models import model_of, written
from tests.python.tiny_models import has_native

TO_TYPE = pages_to_type()
IN_TURN = [
    pytest.param(page, marks=pytest.mark.long) if str(page).endswith(LONG_PAGES) else page
    for page in TO_TYPE
]


@pytest.mark.slow
@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
@pytest.mark.parametrize("page", IN_TURN, ids=lambda page: "-".join(page.parts[-2:]))
def test_commands_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    if any(".gguf" in command for command in TO_TYPE[page]):
        written(model_of(max_position_embeddings=16384), tmp_path / GGUF)
    reader, told = Reader(tmp_path), {}
    try:
        for command in TO_TYPE[page]:
            if "piped.kvswap" in command and shutil.which("pdftotext") is None:
                continue  # a program that this machine may lack; the page has another way
            told[command] = reader.type(command)
    finally:
        reader.close()
    is_trained = True  # a tiny GGUF model has random weights, and so has the text it saved
    for command, said in told.items():
        if any(f"kvswap {word} " in command for word in ("ingest", "generate")):
            is_trained = ".gguf" not in command
        if "Who tells it?" in command and is_trained:
            assert ANSWER in " ".join(said.split()), f"{command}\n{said}"


def test_every_reason_is_used_and_every_placeholder_too() -> None:
    told = [command for page in PAGES for block in blocks(page) for command in typed(block)]
    for reasons in (NOT_TYPED, LONG, OWN_MODEL):
        assert [start for start in reasons if not any(c.startswith(start) for c in told)] == []
    assert [words for words in STANDS_FOR if not any(words in c for c in told)] == []
    texts = [block.text for page in PAGES for block in blocks(page) if is_shown(block)]
    for long in LONG_PAGES:
        assert any(str(page).endswith(long) for page in TO_TYPE), long
    assert [start for start in SHOWN if not any(text.startswith(start) for text in texts)] == []


def test_what_stands_in_quotes_over_lines_is_one_command() -> None:
    text = "curl a -d '{\n \"b\": 1}'  # it's\ncurl c \\\n  d  # one's\n# e\n"
    assert commands(Block(Path("page.md"), 1, "sh", text)) == [
        "curl a -d '{  \"b\": 1}'",
        "curl c d",
    ]
