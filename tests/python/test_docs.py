"""README and docs/: what they link to is there, and their tables have what the code has.

`test_docs_typed.py` types the commands and `test_docs_python.py` executes the Python;
`python -m tests.packaging.run_docs` types in a fresh clone.
"""

from __future__ import annotations

import ast
import importlib
import re
from fractions import Fraction
from pathlib import Path

import pytest

from tests.first_hour.users import USERS
from tests.packaging.run_docs import PAGES, ROOT, Block, blocks

README_LINES_MAX = 150
LANGUAGES = {"sh", "python", "cpp", "cmake", "text", "output"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCKS = [block for page in PAGES for block in blocks(page)]


def anchors(text: str) -> set[str]:
    """As MkDocs and code hosts make them of headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)):
        target, _, anchor = link.partition("#")
        if link.startswith(("http://", "https://")):
            continue
        path = (page.parent / target).resolve() if target else page
        # The API page's anchors are made of docstrings; `make docs` checks those.
        has_anchor = not anchor or path.name == "api.md" or anchor in anchors(path.read_text())
        if not path.exists() or not has_anchor:
            wrong.append(link)
    assert wrong == []


def test_every_page_is_on_the_site_and_reached_from_the_readme() -> None:
    nav, docs = (ROOT / "mkdocs.yml").read_text(), ROOT / "docs"
    linked = (ROOT / "README.md").read_text() + (docs / "index.md").read_text()
    linked += (docs / "benchmarks" / "index.md").read_text()
    for page in docs.rglob("*.md"):
        assert f"- {page.relative_to(docs).as_posix()}" in nav
        assert page.name == "index.md" or f"{page.name})" in linked
    assert "(docs/benchmarks/index.md)" in linked


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_block_says_its_language_and_python_parses(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.language != "python":
        return
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_table_of_presets_has_each_in_one_row() -> None:
    from kvswap_torch import presets
    from kvswap_torch.cli.presets import about

    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    table = page.split("## Which one")[1].split("## What they are made of")[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|", table, re.MULTILINE))
    assert sorted(rows) == sorted(preset.name for preset in presets())
    for preset in presets():
        memory = about(preset)["memory"]
        told = float(Fraction(rows[preset.name]))
        assert abs(told - memory["summary"] / memory["full_kv"]) <= 0.02 * told, preset.name


def test_a_preset_s_papers_are_linked_in_the_table_and_in_the_glossary() -> None:
    from kvswap_torch import presets
    from kvswap_torch.preset.papers import PAPERS, links

    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    table = page.split("## Which one")[1].split("## What they are made of")[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table, re.MULTILINE))
    named = set()
    for preset in presets():
        assert dict(re.findall(r"\[([^]]+)\]\(([^)]+)\)", rows[preset.name])) == links(preset)
        named |= links(preset).keys()
    assert named == PAPERS.keys() and len(set(PAPERS.values())) == len(PAPERS)
    assert all(url.startswith("https://") for url in PAPERS.values())
    papers = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").split("## Papers")[1]
    assert dict(re.findall(r"^- \[([^]]+)\]\(([^)]+)\)$", papers, re.MULTILINE)) == PAPERS


def test_output_is_shown_after_what_is_typed() -> None:
    """`make first-hour` compares it with what the commands say."""
    for page in PAGES:
        before = None
        for block in blocks(page):
            assert block.language != "output" or before in ("text", "sh"), block.name
            before = block.language


def test_every_page_of_a_first_hour_has_its_user() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "first-hour").glob("*.md")}
    assert pages == set(USERS)


def test_a_cpp_program_s_page_names_the_torch_that_wheels_are_built_for() -> None:
    """Another one has no kvswap::torch; from Python alone a newer one will do."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(r"^torch==\S+$", pins, re.MULTILINE)
    page = (ROOT / "docs" / "first-hour" / "cpp.md").read_text(encoding="utf-8")
    assert re.findall(r"^pip install (torch.*)$", page, re.MULTILINE) == [pin]
