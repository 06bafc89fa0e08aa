"""How we write: the field's own words in pages, docstrings and comments.

Errors are reported, selections made, reads overlapped. A turn stands here when a reader outside the
project had to read it twice; there is a plainer one for each.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.python.test_map import CPP, PYTHON, ROOT, inside

BANNED = {
    r"\b(is|are|be|was|were|been) told\b(?! apart)": "is reported, is returned, is notified",
    r"\btold (as|by|at)\b": "reported as, by, at",
    r"\btells (of|how|where|about)\b": "reports, says",
    r"\bwhoever\b": "name who: the thread, the caller",
    r"\bwhat fails\b": "errors",
    r"\bagain does nothing\b": "idempotent",
    r"\blets? go\b": "drops, frees, releases",
    r"\btaken for\b": "treated as",
    r"\bgoes on beside\b": "is asynchronous, overlaps with",
}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
PRODUCT = [path for path in PYTHON if inside(path, "kvswap_torch/", "tuning/")]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what is written for people: pages, comments, strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string
        return
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix == ".md":
            yield number, line
        elif "//" in line:
            yield number, line.split("//", 1)[1]


@pytest.mark.parametrize("turn", BANNED)
def test_turns_that_have_a_plainer_one(turn: str) -> None:
    pattern = re.compile(turn, re.IGNORECASE)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: write {BANNED[turn]}"
        for path in (*PAGES, *PRODUCT, *CPP)
        for line, text in prose(path)
        if pattern.search(text)
    ]
    assert wrong == []


def test_a_column_is_a_matrix_s_and_a_position_a_sequence_s() -> None:
    """What keeps and serves sequences knows no matrix, but for a setting's name."""
    column = re.compile(r"(?<!score_)column", re.IGNORECASE)
    rooms = [f"csrc/{room}/" for room in ("io", "store", "memory", "device", "engine")]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: write position"
        for path in CPP
        if inside(path, *rooms) or path.name.startswith(("cache", "tensor_cache"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if column.search(line)
    ]
    assert wrong == []


def test_the_public_cache_speaks_of_tokens() -> None:
    wrong = []
    for name in ("cache.py", "stats.py"):
        tree = ast.parse((ROOT / "kvswap_torch" / "hf" / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            is_public = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_"
            if is_public and "column" in (ast.get_docstring(node) or "").lower():
                wrong.append(f"{name}: {node.name}")
    assert wrong == []
