"""What a package must be before anything runs: light to import, typed, and fit for its torch.

``make wheel-check`` covers the rest: it installs the wheel and links a C++ program to it.
"""

import json
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_namespace_packages

import kvswap_torch
from kvswap_torch import native

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def test_importing_starts_nothing_and_loads_neither_torch_nor_transformers() -> None:
    told = python(
        "import sys, threading; before = set(sys.modules); import kvswap_torch\n"
        "heavy = {'torch', 'transformers', 'numpy', 'typer', 'rich', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count())"
    )
    assert told.split("\n")[0] == "[] 1"


def test_importing_patches_nothing() -> None:
    told = python(
        "import torch, transformers\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
        "look = lambda: (sorted(functions.keys()), dict(vars(transformers.PreTrainedModel)),\n"
        "                dict(vars(torch.nn.Module)))\n"
        "before = look(); import kvswap_torch; print(look() == before)"
    )
    assert told.strip() == "True"


def test_names_are_lazy_listed_and_wrong_ones_refused() -> None:
    assert "KVSwapCache" in dir(kvswap_torch)
    assert set(kvswap_torch.__all__) <= set(dir(kvswap_torch))
    with pytest.raises(AttributeError, match="no attribute 'KVSwapCash'"):
        _ = kvswap_torch.KVSwapCash


def test_another_torch_is_refused_and_another_build_of_the_same_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def built_for(torch: str) -> None:
        monkeypatch.setattr(native, "build_info", lambda: {"torch": torch})
        native.check_torch()

    monkeypatch.setattr(native, "torch_version", lambda: "2.13.0+cpu")
    built_for("2.13.0+cpu")
    built_for("2.13.0+cu130")
    with pytest.raises(ImportError, match=r"was built for torch 2\.12\.1, but torch 2\.13\.0\+cpu"):
        built_for("2.12.1")


def test_libraries_with_cuda_need_a_torch_with_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(native, "torch_version", lambda: "2.13.0")
    monkeypatch.setattr(native, "build_info", lambda: {"torch": "2.13.0+cu130", "cuda": 1})
    with pytest.raises(ImportError, match=r"with CUDA, but torch 2\.13\.0 without it is installed"):
        native.check_torch()
    (torch / "lib" / "libc10_cuda.so").touch()
    native.check_torch()


def test_an_unbuilt_tree_says_so_when_the_library_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "PACKAGE_DIR", tmp_path)
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "lib" / "libkvswap_torch.so")
    assert native.build_info() is None
    native.check_torch()
    with pytest.raises(ImportError, match="run: make build"):
        native.require_library()


def test_what_was_built_tells_with_what() -> None:
    info = native.build_info()
    assert info is not None, "run: make build"
    assert {"torch", "liburing", "highway", "xxhash", "json", "build_type"} <= set(info)
    assert native.require_library().is_file()


@pytest.mark.skipif(
    not Path(sys.prefix).resolve().is_relative_to(ROOT), reason="this environment is not the tree's"
)
def test_what_make_builds_works_from_any_folder(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    where = run(sys.executable, "-c", "import kvswap_torch; print(kvswap_torch.__file__)")
    assert Path(where.strip()) == ROOT / "kvswap_torch" / "__init__.py"
    for name in PYPROJECT["project"]["scripts"]:
        assert "Usage" in run(str(Path(sys.prefix) / "bin" / name), "--help")


def test_version_is_written_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvswap_torch.__version__)
    assert "version" in PYPROJECT["project"]["dynamic"]


def test_one_top_level_package_is_installed() -> None:
    find = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    packages = find_namespace_packages(str(ROOT), **find)
    assert {"kvswap_torch", "kvswap_torch.hf", "kvswap_torch.tuning"} <= set(packages)
    assert {name.split(".")[0] for name in packages} == {"kvswap_torch"}


def test_data_files_travel_with_the_package() -> None:
    for name in PYPROJECT["tool"]["setuptools"]["package-data"]["kvswap_torch"]:
        assert resources.files("kvswap_torch").joinpath(name).is_file()
    json.loads(resources.files("kvswap_torch").joinpath("config.schema.json").read_text())


def test_every_tool_is_pinned_exactly_and_torch_leads() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0].startswith("torch==")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    project: dict[str, Any] = PYPROJECT["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {re.split("[<>=]", name)[0].replace("_", "-") for name in wanted} <= pinned


@pytest.mark.parametrize("name", ["consumer", "consumer_core"])
def test_the_docs_show_the_programs_that_wheel_check_builds(name: str) -> None:
    page = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
    shown = re.search(rf"<!-- program:{name} -->\n```cpp\n(.*?)```\n", page, re.DOTALL)
    program = ROOT / "tests" / "packaging" / name / "main.cpp"
    assert shown is not None and shown[1] == program.read_text(encoding="utf-8")


def test_ci_runs_what_the_readme_tells() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("exec make test")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "make test" in (ROOT / "README.md").read_text()
