"""What a package must be before anything runs: light to import, typed, and fit for its torch.

``make wheel-check`` covers the rest: it installs the wheel and links a C++ program to it.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from setuptools import find_namespace_packages

import kvswap_torch
from kvswap_torch import native
from kvswap_torch.elf_symbols import SharedLibrary
from tests.packaging import oldest_torch, other_transformers, version_matrix

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


def test_an_older_torch_is_refused_and_another_build_of_the_same_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def built_for(torch: str) -> None:
        monkeypatch.setattr(native, "build_info", lambda: {"torch": torch})
        native.check_torch()

    monkeypatch.setattr(native, "torch_version", lambda: "2.13.0+cpu")
    built_for("2.13.0+cpu")
    built_for("2.13.0+cu130")
    for other in ("2.14.0", "1.13.0", "3.0.0", "unknown"):
        with pytest.raises(ImportError, match=rf"built for torch {other}, but torch 2\.13\.0\+cpu"):
            built_for(other)


def shared_library(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(code)
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-Wl,--hash-style=gnu"]
    subprocess.run([*command, "-o", str(path), str(source)], check=True)
    return path


@pytest.fixture
def newer_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Libraries of ours that need three symbols, and the folder of a newer torch, empty yet."""
    needs = "void torch_a(); void torch_b(); void torch_c(); void Py_Own(); int ours();\n"
    calls = "int f() { torch_a(); torch_b(); torch_c(); Py_Own(); return ours(); }"
    for module, name in (("LIBRARY", "lib/libkvswap_torch.so"), ("EXTENSION", "_C.so")):
        code = needs + (calls if module == "EXTENSION" else "int ours() { torch_b(); return 1; }")
        shared_library(tmp_path / "package" / name, code)
    monkeypatch.setattr(native, "PACKAGE_DIR", tmp_path / "package")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "package/lib/libkvswap_torch.so")
    monkeypatch.setattr(native, "build_info", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(native, "torch_version", lambda: "2.15.0+cu130")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "torch" / "lib"


def test_a_newer_torch_with_all_symbols_is_taken(newer_torch: Path) -> None:
    shared_library(newer_torch / "libtorch_cpu.so", "void torch_a() {} void torch_b() {}")
    shared_library(newer_torch / "libc10.so", "void torch_c() {}")
    native.check_torch()


def test_a_newer_torch_that_lacks_a_symbol_is_refused_by_name(newer_torch: Path) -> None:
    # Elsewhere it does not count, nor where torch itself asks another library for it.
    shared_library(newer_torch / "libtorch_cpu.so", "void torch_b(); void torch_a() { torch_b(); }")
    shared_library(newer_torch / "libother.so", "void torch_b() {}")
    shared_library(newer_torch / "libc10.so", "void torch_c() {}")
    with pytest.raises(ImportError) as refused:
        native.check_torch()
    assert re.search(
        r"built for torch 2\.13\.0, but torch 2\.15\.0\+cu130 is installed, which lacks 1 of the 3 "
        r"symbols that the libraries need, the first of them torch_b; install that torch, or build",
        str(refused.value),
    )


def test_a_newer_torch_whose_libraries_cannot_be_read_is_refused(newer_torch: Path) -> None:
    newer_torch.mkdir()
    for content in (b"", b"no library", b"\x7fELF\x02\x01" + bytes(100)):
        (newer_torch / "libtorch_cpu.so").write_bytes(content)
        with pytest.raises(
            ImportError, match=r"symbols cannot be read \(.*/libtorch_cpu\.so: must be"
        ):
            native.check_torch()


def test_what_our_libraries_need_of_torch_is_what_the_installed_one_has() -> None:
    needed, lacking = native._torch_symbols()
    assert needed > 100 and lacking == []
    told = subprocess.run(
        ["nm", "-D", "--undefined-only", str(native.LIBRARY)], check=True, capture_output=True
    ).stdout.decode()
    unversioned = {line.split()[1] for line in told.splitlines() if line.split()[0] == "U"}
    with SharedLibrary(native.LIBRARY) as library:
        assert set(library.needed()) == {name for name in unversioned if "@" not in name}


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


def test_files_of_the_oldest_torch_are_compiled_at_once_or_one_by_one(tmp_path: Path) -> None:
    def source(name: str, code: str) -> Path:
        (tmp_path / name).write_text(f"namespace {{ {code} }}\n")
        return tmp_path / name

    one, same = source("one.cpp", "int f() { return 1; }"), source("same.cpp", "int f(); int g();")
    wrong = source("wrong.cpp", "int f() { return nothing_of_that_name; }")
    compile_all = oldest_torch.compile_all
    assert compile_all([[one], [same]], [], tmp_path) == []
    twice = source("twice.cpp", "int f() { return 2; }")
    assert compile_all([[one, twice], [same]], [], tmp_path) == []
    (told,) = compile_all([[one, same], [wrong, twice]], [], tmp_path)
    assert "wrong.cpp:1" in told and "nothing_of_that_name" in told


def test_both_ends_of_torchs_range_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    releases = (oldest_torch.oldest(), oldest_torch.NEWEST)
    assert releases == (version_matrix.TORCHES[0], version_matrix.TORCHES[-1])
    seen: list[str] = []
    wrong = {releases[1]: 2}

    def check(release: str) -> int:
        seen.append(release)
        return wrong.get(release, 0)

    monkeypatch.setattr(oldest_torch, "check", check)
    assert oldest_torch.main(["oldest"]) == 0 and oldest_torch.main(["newest"]) == 1
    assert oldest_torch.main([]) == 1 and seen == [*releases, *releases]
    assert oldest_torch.main(["middle"]) == 2
    assert "must be asked for oldest or newest, got middle" in capsys.readouterr().out


def test_headers_that_cannot_be_had_are_an_error_unless_they_may_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[str | None] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        asked.append(env.get("PIP_CONFIG_FILE"))
        return subprocess.CompletedProcess(command, 1, "", "warning\nERROR: no such release\n")

    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    monkeypatch.setattr(oldest_torch.subprocess, "run", run)
    monkeypatch.setattr(oldest_torch, "ROOT", tmp_path)
    monkeypatch.setattr(oldest_torch, "oldest", lambda: "2.11.0")
    assert oldest_torch.main(["newest"]) == 1
    assert asked == [None, os.devnull], "as pip is set up, and then without its settings"
    assert "must be fetched and cannot be: ERROR: no such release" in capsys.readouterr().out
    assert oldest_torch.main(["newest", "--may-skip"]) == 0
    assert "when it is: make newest-torch" in capsys.readouterr().out


def test_the_page_of_versions_has_the_ranges_that_are_installed() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    project: dict[str, Any] = PYPROJECT["project"]
    ranges = [f"Python {project['requires-python']}"]
    for line in project["dependencies"][:2]:
        name, wanted = re.fullmatch(r"(\w+)(.*)", line).groups()
        ranges.append(f"{name} {wanted}")
    for each in ranges:
        assert f"`{each}`" in page
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for name in ("torch", "transformers"):
        assert f"{name} {pinned[name]}" in page
    for release in (other_transformers.oldest(), other_transformers.NEWEST):
        assert f"transformers {release}" in page
    for release in (oldest_torch.oldest(), oldest_torch.NEWEST):
        assert f"torch {release}" in page


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


@pytest.mark.parametrize(("stand_in", "told"), [
    ("setuptools = types.ModuleType('setuptools'); setuptools.__version__ = '65.5'", "got 65.5"),
    ("setuptools = None", "and none is"),
], ids=["an old one", "none"])  # fmt: skip
def test_a_build_without_a_fitting_setuptools_says_so_in_one_sentence(
    stand_in: str, told: str
) -> None:
    system = PYPROJECT["build-system"]
    code = (
        f"import sys, types; {stand_in}; sys.modules['setuptools'] = setuptools\n"
        f"sys.path[:0] = {system['backend-path']}; import {system['build-backend']}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    (wanted,) = system["requires"]
    oldest = wanted.removeprefix("setuptools>=")
    assert done.stderr == (
        f"kvswap_torch: setuptools {oldest} or newer must be installed to build, {told}; run: pip "
        f"install '{wanted}', then: pip install --no-build-isolation .\n"
    )


@pytest.mark.parametrize(("there", "told"), [
    ((), "cmake must be on PATH to build and is not"),
    (("cmake",), "ninja must be on PATH to build and is not"),
    (("cmake", "ninja"), "a C++20 compiler, as g++ 12, must be on PATH to build and is not; looked "
     "for c++, g++, clang++; install g++ or set CXX"),
    (("cmake", "ninja", "g++"), "torch must be installed to build and is not found; install torch, "
     "then: pip install --no-build-isolation . (import of torch halted; None in sys.modules)"),
], ids=["no cmake", "no ninja", "no compiler", "no torch"])  # fmt: skip
def test_what_a_build_lacks_is_said_in_one_sentence(
    there: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    for tool in there:
        (tmp_path / tool).symlink_to("/bin/false")
    code = (
        "import runpy, sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['setup.py', '-q', 'build_ext', '--build-lib', {str(tmp_path / 'lib')!r}]\n"
        f"runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')"
    )
    outside = ("PATH", "CXX", "KVSWAP_PREBUILT", "KVSWAP_NO_LIBRARIES", "KVSWAP_CMAKE_ARGS")
    kept = {name: value for name, value in os.environ.items() if name not in outside}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True,
        env=kept | {"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"kvswap_torch: {told}"


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


def _needed_python(name: str) -> str:
    return importlib.metadata.metadata(name).get("Requires-Python") or ""


def test_every_pin_is_for_the_python_of_a_debian_12() -> None:
    """`make demo` on such a machine installs all of them with Python 3.11.2."""
    checked, wrong = 0, []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, release = line.partition("==")
        if line.startswith("#") or importlib.metadata.version(name).split("+")[0] != release:
            continue  # of another release's needs nothing is known here
        checked += 1
        if not SpecifierSet(_needed_python(name)).contains("3.11.2"):
            wrong.append(line)
    assert wrong == [] and checked > 80


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


def test_no_build_goes_without_xxhash() -> None:
    """Its header is in the sources, so that every build writes one format of saved caches."""
    header = ROOT / "third_party" / "xxhash" / "xxhash.h"
    assert "#define XXH_VERSION_NUMBER" in header.read_text(encoding="utf-8")
    assert "BSD 2-Clause License" in header.read_text(encoding="utf-8")
    assert "graft third_party" in (ROOT / "MANIFEST.in").read_text()
    told = (ROOT / "cmake" / "KvswapDependencies.cmake").read_text()
    assert "/third_party/xxhash)" in told and "find_path(KVSWAP_XXHASH" not in told
    info = native.build_info()
    assert info is not None and info["xxhash"] == 1


def test_the_recipe_takes_the_sources_that_a_build_needs() -> None:
    """And what CMake reads of them is in what it takes."""
    recipe = (ROOT / "packaging" / "conan" / "conanfile.py").read_text(encoding="utf-8")
    taken = set(re.findall(r'"([\w./]+?)(?:/\*)?"', recipe.split("SOURCES = (")[1].split(")")[0]))
    read = set(re.findall(r"PROJECT_SOURCE_DIR}/(\w+)", "".join(
        path.read_text() for path in (ROOT / "cmake").glob("*.cmake"))))  # fmt: skip
    assert read - {"kvswap_torch"} <= taken
    assert {"CMakeLists.txt", "LICENSE", "cmake", "kvswap_torch/version.py"} <= taken
    assert all((ROOT / name).exists() for name in taken)


def test_the_demo_says_beforehand_what_it_fetches_and_builds(tmp_path: Path) -> None:
    def told(root: Path, venv: Path) -> str:
        script = root / ".ci" / "plan"
        return subprocess.run([script, venv], check=True, capture_output=True, text=True).stdout

    made = tmp_path / "clone" / ".ci" / "plan"
    made.parent.mkdir(parents=True)
    made.write_text((ROOT / ".ci" / "plan").read_text())
    made.chmod(0o755)
    first = told(made.parents[1], tmp_path / ".venv")
    assert re.search(r"download packages into .*/\.venv: some \d+ MB .* GB on disk", first)
    assert re.search(r"compile \d+ files .* about \d+ minutes on \d+ cores", first)
    # Where all is there, nothing is announced.
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".kvswap-setup").touch()
    library = made.parents[1] / "kvswap_torch" / "lib" / "libkvswap_torch.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert told(made.parents[1], tmp_path / ".venv") == ""
    makefile = (ROOT / "Makefile").read_text()
    assert "\t@.ci/plan $(VENV)\n" in makefile.split("\ndemo:")[1].split("\n\n")[0]
