"""Each page's Python blocks, executed in order in one namespace with what the page's prose gives.

The model is the reference model. `NOT_EXECUTED` has the blocks that are left out, with the reason,
and `LONG` those that only ``KVSWAP_TEST_LONG=1`` (`make test-long`) executes.
"""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from kvswap_torch import KVSwapCache, SwapConfig
from tests.how_long import is_long
from tests.packaging.run_docs import PAGES, ROOT, Block, blocks
from tests.python.tiny_models import has_native

MODEL = str(ROOT / "examples" / "reference_model")
# A line of a block -> why the block is not executed.
NOT_EXECUTED = {
    "import ray": "a package that is not among the tests'; test_example_batch.py runs the class",
    "DistributedConfig(pp_size=2)": "two processes with a stage each; test_parallel.py has them",
}
# The same; `make test-long` executes these.
LONG = {"import tune": "times decoding steps for minutes"}
# What a page writes -> what a test has; a limit is one that a small model on any machine can have.
STANDS_FOR = {
    "/fast/disk": "disk",
    '"DIR"': f'"{MODEL}"',
    "examples/reference_model": MODEL,
    "docs/quick-start.md": str(ROOT / "docs" / "quick-start.md"),
    "max_new_tokens=200": "max_new_tokens=4",
    '"6GiB"': '"5MiB"',
    "max_context_len=32768, max_batch_size=8": "max_context_len=1024, max_batch_size=1",
}
SAID = {"README.md": "copper lantern"}
PROGRAMS = {
    page: found
    for page in PAGES
    if (found := [block for block in blocks(page) if block.language == "python"])
}


def left_out(block: Block) -> str | None:
    reasons = NOT_EXECUTED if is_long() else NOT_EXECUTED | LONG
    return next((why for line, why in reasons.items() if line in block.text), None)


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """A model, its tokenizer and a short prompt, as the pages take them for granted."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    inputs = tokenizer("The keeper is called Elizabeth. " * 8, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    return {"model": model, "tokenizer": tokenizer, "inputs": inputs, "book": inputs}


@pytest.mark.slow
@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
@pytest.mark.filterwarnings("ignore")  # transformers', on sampling options set for one call
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: "-".join(page.parts[-2:]))
def test_blocks_of_a_page_run(
    page: Path,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    SwapConfig().save("config.json")
    (tmp_path / "heads.json").write_text(heads_file())
    monkeypatch.setattr(logging.getLogger("kvswap_torch"), "level", logging.NOTSET)
    names = given | {"folder": MODEL, "disk": "disk"}
    names |= {"SwapConfig": SwapConfig, "KVSwapCache": KVSwapCache}
    with KVSwapCache(given["model"], "disk", max_context=1024) as names["cache"]:
        for block in PROGRAMS[page]:
            if left_out(block) is None:
                exec(compile(replaced(block.text), block.name, "exec"), names)
    for made in names.values():
        if isinstance(made, KVSwapCache):
            made.close()
    gc.collect()
    assert SAID.get(page.name, "") in capsys.readouterr().out


def replaced(text: str) -> str:
    words = re.compile("|".join(re.escape(words) for words in STANDS_FOR))
    return words.sub(lambda found: STANDS_FOR[found[0]], text)


def heads_file() -> str:
    """The one that docs/presets.md shows."""
    shown = [b.text for b in blocks(ROOT / "docs" / "presets.md") if b.language == "text"]
    (found,) = (text for text in shown if text.startswith('{"heads"'))
    return found


def test_every_reason_is_used_and_every_placeholder_too() -> None:
    told = "".join(block.text for found in PROGRAMS.values() for block in found)
    assert [words for words in (NOT_EXECUTED | LONG | STANDS_FOR) if words not in told] == []
