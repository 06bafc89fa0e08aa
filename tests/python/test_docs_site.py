"""The site of docs/: groups of pages, a home with a picture and numbers, colours of code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import markdown
import yaml

from tests.packaging.run_docs import PAGES, blocks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
GROUPS = ["The first hour", "How to", "Explanation", "Reference", "Benchmarks", "Papers"]
COLOURED = {"python", "cpp", "cmake"}
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
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(pages) == len(set(pages)) and set(pages) == there - {home}


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
