"""The site of docs/: groups of pages, a home with a picture and numbers, colours of code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml

from kvswap_torch.preset.papers import PAPERS
from tests.packaging.run_docs import PAGES, blocks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMES = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
GROUPS = ["The first hour", "How to", "Explanation", "Reference", "Benchmarks", "Papers"]
COLOURED = {"python", "cpp", "cmake"}
# Settings are made of the fields, the API of docstrings; the home leads to a page of each paper.
WITHOUT_LINKS = {"settings.md", "api.md", "index.md"}
# Where a name is none, or is no first mention in a sentence: code, headings and pictures.
NO_PROSE = (r"```.*?```", r"`[^`\n]*`", r"(?m:^#+ .*$)", r"(?m:^!\[.*$)")
URL = r"https?://|//[a-z]"


def html_of(text: str) -> str:
    """As the site makes it of Markdown."""
    names = [name if isinstance(name, str) else next(iter(name)) for name in extensions()]
    configs: dict[str, Any] = {}
    for each in extensions():
        configs |= {} if isinstance(each, str) else each
    return markdown.markdown(text, extensions=names, extension_configs=configs)


def extensions() -> list[Any]:
    return SITE["markdown_extensions"]


def test_every_page_but_the_home_is_in_a_group() -> None:
    home, *groups = SITE["nav"]
    assert home == "index.md"
    assert [next(iter(group)) for group in groups] == GROUPS
    pages = [page for group in groups for page in next(iter(group.values()))]
    assert len(pages) == len(set(pages)) and set(pages) == NAMES - {home}


def test_the_home_names_the_groups_in_their_order() -> None:
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert heads == ["In three numbers", *GROUPS[:4], "Benchmarks and papers"]
    before = page.partition("## ")[0]
    assert "**For whom?**" in before and re.search(r"!\[[^]]+\]\(overview\.svg\)", before)


def test_the_picture_says_disk_summary_pages_and_prefetch() -> None:
    drawn = (DOCS / "overview.svg").read_text(encoding="utf-8")
    words = " ".join(re.findall(r">([^<>]+)</t", drawn))
    for word in ("Disk", "summary of all keys", "pages", "prefetch"):
        assert word in words


def test_code_has_colours_of_this_site_alone() -> None:
    assert SITE["theme"]["highlightjs"] is False  # the theme's comes from another host
    assert set(SITE["extra_css"]) == {path.name for path in DOCS.glob("*.css")}
    rules = (DOCS / "code.css").read_text(encoding="utf-8")
    for path in DOCS.glob("*.css"):
        assert not re.search(URL, path.read_text(encoding="utf-8"))
    known = re.findall(r'span\[class\^="(\w)"\]', rules)
    plain = set(re.findall(r"span\.(\w+)", rules))
    shown = [block for page in PAGES for block in blocks(page) if block.language in COLOURED]
    assert len(shown) > 20
    for block in shown:
        made = html_of(f"```{block.language}\n{block.text}\n```")
        classes = set(re.findall(r'<span class="(\w+)">', made))
        assert 'class="highlight"' in made and "err" not in classes, block.name
        assert classes & plain or any(name[0] in known for name in classes), block.name


def test_the_site_says_what_colours_its_code() -> None:
    """Pygments makes the marks; without it there would be none, and no error."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (docs,) = re.findall(r"^docs = \[(.*)\]$", project, re.MULTILINE)
    assert '"Pygments"' in docs
    assert re.search(r"^Pygments==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def unlinked(text: str, addresses: dict[str, str]) -> list[str]:
    """Names whose first mention in a page's sentences and tables is no link to their address."""
    for pattern in NO_PROSE:
        text = re.sub(pattern, " ", text, flags=re.DOTALL)
    text, wrong = f" {text}", []
    for name, address in addresses.items():
        found = re.search(rf"\b{name}\b", text)
        if found and not text[found.start() - 1 :].startswith(f"[{name}]({address})"):
            wrong.append(name)
    return wrong


def test_a_name_is_linked_where_a_page_has_it_first() -> None:
    there = {"Quest": "https://a.example/1"}
    assert unlinked("Quest, and [Quest](https://a.example/1)", there) == ["Quest"]
    assert unlinked("[Quest](https://a.example/2)", there) == ["Quest"]
    assert unlinked("# Quest\n`Quest` and [Quest](https://a.example/1)'s, Quest", there) == []


@pytest.mark.parametrize("page", sorted(NAMES - WITHOUT_LINKS))
def test_papers_are_linked_where_a_page_names_them_first(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    prkv = {} if page == "papers/prkv.md" else {"PRKV": "papers/prkv.md"}
    assert unlinked(text, PAPERS | prkv) == []


def test_a_paper_without_an_address_is_named_with_its_title() -> None:
    for page in ("papers/prkv.md", "glossary.md"):
        words = " ".join((DOCS / page).read_text(encoding="utf-8").split())
        assert "Page Restricted KV Cache for High Accuracy and Efficiency LLM Generation" in words
        assert "anonymous authors" in words and "no public address" in words.lower()
