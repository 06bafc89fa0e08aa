"""Tools measure and train; what they lack they name. Installing is a command of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "tools", "examples", "tuning", "kvswap_torch")
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()
)
INSTALLERS = (
    r"(?:apt|apt-get|aptitude|dnf|yum|apk|pacman|snap|conda|mamba|brew|uv|pip|pip3)(?![\w-])"
)
CHANGES = {"install", "reinstall", "upgrade", "dist-upgrade", "update", "remove", "sync", "add"}
MODULES = {"pip", "ensurepip", "apt", "conda"}
STARTS = {"system", "popen", "execv", "execvp", "execl", "execlp", "spawnv", "spawnvp"}
COMMAND = re.compile(
    rf"\s*(?:sudo\s+)?(?:\S*python\S*\s+-m\s+)?{INSTALLERS}\s+(?:-\S+\s+)*(?:{'|'.join(CHANGES)})\b"
)


def installs(source: str) -> Iterator[int]:
    """Lines of Python that install packages, or that would if the text were run."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    starts_programs = any(map(_starts_programs, nodes))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if MODULES & {name.split(".")[0] for name in names}:
                yield node.lineno
        elif isinstance(node, ast.List | ast.Tuple):
            words = [str(each.value) for each in node.elts if isinstance(each, ast.Constant)]
            words = [Path(word).name for word in words]
            if CHANGES & set(words) and any(re.fullmatch(INSTALLERS, word) for word in words):
                yield node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_command = COMMAND.match(node.value) and id(node) not in docstrings
            if starts_programs and is_command:
                yield node.lineno


def _starts_programs(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "subprocess" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module == "subprocess"
    return isinstance(node, ast.Attribute) and node.attr in STARTS


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.run(['apt-get', 'update', '-q'])",
        "import subprocess\nline = 'apt-get install -y ' + name\nsubprocess.run(line.split())",
        "import os\nos.system('sudo apt install -y fio')",
        "from subprocess import run\nrun(f'pip install {name}', shell=True)",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', '-q', 'install', x])",
        "command = ('/usr/bin/apt-get', 'upgrade')",
        "import ensurepip",
        "from pip._internal import main",
    ],
)
def test_ways_to_install_are_found(source: str) -> None:
    assert list(installs(source)) != []


@pytest.mark.parametrize(
    "source",
    [
        '"""apt-get install fio first."""\nimport subprocess',
        "raise ImportError('report: needs matplotlib; run: pip install matplotlib')",
        "import subprocess\nraise ValueError('reader: needs fio; run: apt-get install fio')",
        "import subprocess\nsubprocess.run(['dpkg', '-L', package])",
        "import subprocess\nsubprocess.run([python, '-m', 'pip', 'download', '-q', name])",
        "_EXTRA = 'pip install kvswap_torch[serve]'",
    ],
)
def test_saying_how_to_install_and_asking_what_is_there_are_not(source: str) -> None:
    assert list(installs(source)) == []


def test_no_tool_installs_or_upgrades_packages() -> None:
    assert {path.parts[len(ROOT.parts)] for path in SOURCES} == set(FOLDERS)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for line in installs(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []
