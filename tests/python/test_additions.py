"""A setting, a summary and a retention policy, added to a copy of the sources, work.

`make test` adds them and checks what was added; `make test-long` builds and runs the library, too.

They are added as CONTRIBUTING.md says. The setting is one field of `SwapConfig`; the summary one
C++ file, one Python module, a line in each registry and its name among `summary.kind`; the policy
one C++ file, a line in its registry and a class of its settings. Everything else, files, rules,
schema, C++ settings and the engine, takes them from there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ADDED = ROOT / "tests" / "packaging" / "additions"
SHAPE = {"kv_heads": 2, "head_dim": 16}
SELECTION = {"top_k_groups": 6, "sink_tokens": 0, "recent_tokens": 8, "group_tokens": 4}
CONFIG = {"version": 2, "summary": {"kind": "first"}, "memory": {"pages_per_layer": 16}}
CONFIG |= {"selection": SELECTION | {"patience": 30}}

PATIENCE = "assert schema()['properties']['selection']['properties']['patience']"
FIELD = '    patience: int = number(7, 1, 100, "steps that nobody waits for")\n'
REGISTERED = """    SummaryKind{.name = "first", .source = "", .takes_projections = false,
             .scores_by_mass = false, .needs_all_heads = false, .is_given = false,
             .is_of_clusters = false,
             .on_device = nullptr, .shape = FirstEncoder::shape_of, .make = FirstEncoder::make},
"""
POLICY = '''
@documented
@dataclass(frozen=True)
class KNorm(Retention):
    """Tokens whose keys are shortest."""

    POLICY = "knorm"

    tokens: int = _tokens()


'''
# Reading headers is most of what such a build does.
PROGRAM = """
add_executable(additions main.cpp)
target_link_libraries(additions PRIVATE kvswap_options kvswap_core)
foreach(room device engine)
  target_precompile_headers(kvswap_${room}_objects PRIVATE
    <functional> <map> <memory> <optional> <span> <string> <variant> <vector> csrc/device/device.h)
endforeach()
target_precompile_headers(kvswap_engine_objects PRIVATE csrc/engine/engine_context.h)
target_precompile_headers(kvswap_public_objects PRIVATE csrc/kvswap/cache.h)
"""


def insert(path: Path, before: str, text: str) -> None:
    """Puts `text` before the one place of `before`."""
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1, f"{path.name}: {before!r}"
    path.write_text(source.replace(before, text + before), encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with all additions."""
    tree = tmp_path_factory.mktemp("additions")
    for part in ("csrc", "cmake", "third_party"):
        shutil.copytree(ROOT / part, tree / part)
    shutil.copytree(
        ROOT / "kvswap_torch",
        tree / "kvswap_torch",
        symlinks=True,
        ignore=shutil.ignore_patterns("*.so", "lib", "include", "__pycache__"),
    )
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    shutil.copy(ADDED / "main.cpp", tree)

    # The setting: one field. The method: its C++ file, its module, and where each is registered.
    config = tree / "kvswap_torch" / "config" / "blocks.py"
    insert(config, "    max_step_tokens: int = number(\n", FIELD)
    insert(config, '"user", "none"),', '"first", ')
    shutil.copy(ADDED / "first_encoder.h", tree / "csrc" / "methods" / "summary")
    kinds = tree / "csrc" / "methods" / "summary" / "summary_registry.cpp"
    included = '#include "methods/summary/user_scored_encoder.h"'
    insert(kinds, included, '#include "methods/summary/first_encoder.h"\n')
    insert(kinds, '    SummaryKind{.name = "given",', REGISTERED)
    methods = tree / "tests" / "python" / "reference_methods"
    shutil.copytree(ROOT / "tests" / "python" / "reference_methods", methods)
    shutil.copy(ROOT / "tests" / "__init__.py", tree / "tests")
    shutil.copy(ADDED / "first.py", methods)
    insert(methods / "__init__.py", "kvswap, quest, shadowkv\n", "first, ")
    line = '    "first": Method("first", "a test", False, first.group_scores),\n'
    insert(methods / "__init__.py", '    "given": Method(', line)

    # The policy: its C++ file and its settings, and where both are registered.
    policies = tree / "csrc" / "methods" / "retention"
    shutil.copy(ADDED / "knorm.h", policies)
    registry = policies / "retention_registry.cpp"
    insert(
        registry,
        '#include "methods/retention/recent_only.h"',
        '#include "methods/retention/knorm.h"\n',
    )
    insert(registry, "&UserRetention::kKind", "&KNorm::kKind, ")
    retention = tree / "kvswap_torch" / "config" / "retention.py"
    insert(retention, "#: Every policy by its name", POLICY)
    insert(retention, "UserRetention)\n", "KNorm, ")

    # What `make schema` does.
    for name, said in (("settings.h", "settings"), ("settings_rules.h", "rules")):
        code = f"from kvswap_torch.config import cpp_codegen; print(cpp_codegen.{said}(), end='')"
        (tree / "csrc" / "kvswap" / name).write_text(run_python(tree, code), encoding="utf-8")
    return tree


@pytest.fixture(scope="module")
def built(tree: Path) -> Path:
    """They compiled without torch, which takes minutes of a processor."""
    with (tree / "CMakeLists.txt").open("a", encoding="utf-8") as file:
        file.write(PROGRAM)
    options = ["-DKVSWAP_BUILD_TORCH=OFF", "-DKVSWAP_BUILD_TESTS=OFF", "-DCMAKE_BUILD_TYPE=Debug"]
    built = tree / "build"
    quick = "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -DHWY_COMPILE_ONLY_STATIC"  # kernels for one processor
    run(["cmake", "-S", tree, "-B", built, "-GNinja", *options, quick])
    run(["ninja", "-C", built, f"-j{os.cpu_count()}", "additions"])
    return tree


def run(command: list[object]) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=850
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def run_python(tree: Path, code: str) -> str:
    return run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tree)!r})\n{code}"])


def ask(tree: Path, folder: Path, config: dict[str, object]) -> subprocess.CompletedProcess[str]:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [tree / "build" / "additions", path, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_python_reads_a_config_file_with_both(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    read = f"from kvswap_torch import SwapConfig; assert SwapConfig.load({str(path)!r})"
    schema = "from kvswap_torch.config.json_schema import schema"
    run_python(tree, f"{read}\n{schema}\n{PATIENCE}['maximum'] == 100")
    refused = """
from kvswap_torch import ConfigError, SwapConfig
try:
    SwapConfig(selection={"patience": 101})
except ConfigError as error:
    print(error)
"""
    assert "patience" in run_python(tree, refused)


@pytest.mark.parametrize(
    "registry", ["methods/summary/summary_registry.cpp", "methods/retention/retention_registry.cpp"]
)
def test_a_registry_with_the_addition_compiles(registry: str, tree: Path) -> None:
    run(["g++", "-std=c++20", "-fsyntax-only", f"-I{tree}/csrc", tree / "csrc" / registry])


@pytest.mark.long
def test_the_library_reads_a_config_file_with_both(built: Path, tmp_path: Path) -> None:
    keys = torch.randn(64, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    tmp_path.joinpath("keys.bin").write_bytes(keys)
    tmp_path.joinpath("query.bin").write_bytes(keys)
    told = ask(built, tmp_path, CONFIG)
    assert told.returncode == 0, told.stdout
    assert told.stdout.split()[0] == "30"
    for value in (0, 101, "soon"):
        told = ask(built, tmp_path, CONFIG | {"selection": SELECTION | {"patience": value}})
        assert told.returncode == 1
        assert "patience" in told.stdout


@pytest.mark.long
def test_the_method_chooses_as_its_reference(built: Path, tmp_path: Path) -> None:
    tokens, draw = 203, torch.Generator().manual_seed(1)
    keys = torch.randn(SHAPE["kv_heads"], tokens, SHAPE["head_dim"], generator=draw)
    query = torch.randn(4, 1, SHAPE["head_dim"], generator=draw)
    tmp_path.joinpath("keys.bin").write_bytes(keys.numpy().tobytes())
    tmp_path.joinpath("query.bin").write_bytes(query.numpy().tobytes())
    told = ask(built, tmp_path, CONFIG)
    assert told.returncode == 0, told.stdout

    # Groups of all but the newest tokens, which are the tail.
    sealed = (tokens - SELECTION["recent_tokens"]) // SELECTION["group_tokens"]
    torch.save((keys[:, : 4 * sealed], query), tmp_path / "tensors.pt")
    code = f"""
import torch
from tests.python.reference_methods import METHODS
keys, query = torch.load({str(tmp_path / "tensors.pt")!r})
scores = METHODS["first"].group_scores(keys, torch.ones(keys.shape[1]).bool(), query, 4)
print(*scores[0].topk(6).indices.sort().values.tolist())
"""
    assert told.stdout.splitlines()[0].split()[1:] == run_python(built, code).split()


@pytest.mark.long
def test_the_policy_retains_as_its_reference(built: Path, tmp_path: Path) -> None:
    tokens, retained, draw = 203, 12, torch.Generator().manual_seed(2)
    keys = torch.randn(SHAPE["kv_heads"], tokens, SHAPE["head_dim"], generator=draw)
    query = torch.randn(4, 1, SHAPE["head_dim"], generator=draw)
    tmp_path.joinpath("keys.bin").write_bytes(keys.numpy().tobytes())
    tmp_path.joinpath("query.bin").write_bytes(query.numpy().tobytes())
    own = {"summary": {"kind": "none"}, "retention": {"policy": "knorm", "tokens": retained}}
    told = ask(built, tmp_path, CONFIG | own)
    assert told.returncode == 0, told.stdout

    sealed = (tokens - SELECTION["recent_tokens"]) // SELECTION["group_tokens"] * 4
    norms = keys[:, :sealed].square().sum((0, 2))
    attended = torch.cat(
        [norms.topk(retained, largest=False).indices, torch.arange(sealed, tokens)]
    )
    seen = keys[:, attended].repeat_interleave(2, dim=0)
    right = torch.nn.functional.scaled_dot_product_attention(query, seen, seen, scale=0.25)
    output = torch.tensor([float(number) for number in told.stdout.splitlines()[1].split()])
    torch.testing.assert_close(output.reshape(right.shape), right, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_policy_has_its_own_settings_alone(built: Path, tmp_path: Path) -> None:
    own = {"policy": "knorm", "tokens": 8, "window_size": 4}
    told = ask(built, tmp_path, CONFIG | {"summary": {"kind": "none"}, "retention": own})
    assert told.returncode == 1
    assert "retention.window_size: is not an option of policy 'knorm'" in told.stdout
