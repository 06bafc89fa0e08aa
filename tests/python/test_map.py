"""The layering map, read off the includes and imports and held true.

`CONTRIBUTING.md` draws it. Two walls do most of the work: torch only in csrc/torch and csrc/python,
transformers only in kvswap_torch/hf (the command line and calibration load it inside functions).
"""

import ast
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "kvswap_torch"

LINES_MAX = 600
BODY_LINES_MAX = 60
KNOT_MAX = 3  # pairs of a header and its source that may lead to one another
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core"}

# Who may include whom. Every room sees io's Status, where small things are kept, what is saved.
SHARED = {"io/status.h", "io/pooled_memory.h", "io/saved_tensor.h"}
# The table of settings, and what a pass is: plain words, which the engine is made of and every face
# shows.
TABLE = {"kvswap/pass.h", "kvswap/settings.h", "kvswap/settings_rules.h"}
MAY_INCLUDE = {
    "io": {"io"},
    "kernels": {"kernels"},
    "store": {"store", "io"},
    "memory": {"memory"},
    "device": {"device", "io", "kernels"},
    "methods": {"methods", "device", "kernels"},
    "engine": {"engine", "io", "kernels", "store", "memory", "device", "methods"},
    "kvswap": {"kvswap", "io", "kernels", "store", "memory", "device", "methods", "engine"},
    "torch": {"torch", "kvswap", "io", "kernels", "store", "memory", "device", "methods", "engine"},
    "python": {
        "python",
        "torch",
        "kvswap",
        "io",
        "kernels",
        "store",
        "memory",
        "methods",
        "engine",
    },
}
# Foreign headers behind a wall: first part of an <include> -> the only places for it.
WALLED = {
    "ATen": ("torch/", "python/"),
    "c10": ("torch/", "python/"),
    "torch": ("torch/", "python/"),
    "pybind11": ("python/",),
    "Python": ("python/",),
    "liburing": ("io/",),
    "hwy": ("kernels/cpu/",),
    "nlohmann": ("kvswap/json.h",),
    "cuda": ("kernels/cuda/", "device/cuda/", "torch/"),
    "cub": ("kernels/cuda/",),
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def sources(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())


CPP = sources(CSRC, ".h", ".cpp", ".cu", ".cuh")
CPP_TESTS = [
    path for name in ("tests", "bench") for path in sources(ROOT / name, ".h", ".cpp", ".cuh")
]
PYTHON = [path for name in ("kvswap_torch", "tuning", "examples", "tests", "bench", "tools")
          for path in sources(ROOT / name, ".py")]  # fmt: skip


def includes(path: Path) -> Iterator[tuple[bool, str]]:
    """(in quotes, what) for each include."""
    for quote, what in INCLUDE.findall(path.read_text(encoding="utf-8")):
        yield quote == '"', what


def ours(quoted: bool, what: str) -> bool:
    """Whether an include names a file of ours; "hwy/..." in quotes does not."""
    return quoted and what.split("/")[0] in MAY_INCLUDE


def import_nodes(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """(statement, at import time) for each import outside ``if TYPE_CHECKING``."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_import
        inside = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree, True)


def source_of(node: ast.ImportFrom, package: str) -> str:
    """The absolute module that an import is from."""
    parts = package.split(".")
    prefix = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
    return ".".join(filter(None, (prefix, node.module)))


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, bool]]:
    """(absolute module, at import time) for each import outside ``if TYPE_CHECKING``."""
    for node, at_import in import_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield source_of(node, package), at_import
        else:
            yield from ((alias.name, at_import) for alias in node.names)


def imports_of(path: Path) -> list[tuple[str, bool]]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imports(ast.parse(path.read_text(encoding="utf-8")), package))


def inside(path: Path, *places: str) -> bool:
    relative = path.relative_to(ROOT).as_posix()
    return any(relative == place or relative.startswith(place) for place in places)


def test_every_room_includes_only_what_is_below_it() -> None:
    wrong = []
    for path in CPP:
        room = path.relative_to(CSRC).parts[0]
        for quoted, what in includes(path):
            if not ours(quoted, what) or what in SHARED or (room == "engine" and what in TABLE):
                continue
            if what.split("/")[0] not in MAY_INCLUDE[room]:
                wrong.append(f"{path.relative_to(ROOT)} includes {what}")
    assert wrong == []


def test_our_headers_are_included_by_their_full_path_and_foreign_ones_in_brackets() -> None:
    wrong = []
    for path in CPP:
        for quoted, what in includes(path):
            if ours(quoted, what) and not (CSRC / what).is_file():
                wrong.append(f"{path.relative_to(ROOT)}: no csrc/{what}")
            # Highway's own samples and macros write "hwy/...".
            elif quoted and not ours(quoted, what) and not what.startswith("hwy/"):
                wrong.append(f"{path.relative_to(ROOT)}: {what} is no path from csrc/")
    assert wrong == []


def test_rooms_are_known() -> None:
    assert {path.relative_to(CSRC).parts[0] for path in CPP} <= set(MAY_INCLUDE)


def test_foreign_headers_stay_behind_their_walls() -> None:
    wrong = []
    for path in CPP:
        for quoted, what in includes(path):
            places = WALLED.get(re.split("[/._]", what)[0])
            if ours(quoted, what) or places is None:
                continue
            if not path.relative_to(CSRC).as_posix().startswith(places):
                wrong.append(f"{path.relative_to(ROOT)} includes <{what}>")
    assert wrong == []


def test_torch_free_tests_stay_torch_free() -> None:
    wrong = []
    for path in CPP_TESTS:
        if inside(path, "tests/cpp/torch/"):
            continue
        for _, what in includes(path):
            if what.split("/")[0] in ("ATen", "c10", "torch", "pybind11"):
                wrong.append(f"{path.relative_to(ROOT)} includes {what}")
    assert wrong == []


def test_cpu_and_cuda_never_include_each_other_and_contracts_include_neither() -> None:
    wrong = []
    for path in sources(CSRC / "kernels", ".h", ".cpp", ".cu", ".cuh"):
        place = path.relative_to(CSRC / "kernels").parts[0]
        for _, what in includes(path):
            for side in ("cpu", "cuda"):
                if what.startswith(f"kernels/{side}/") and place != side:
                    wrong.append(f"{path.relative_to(ROOT)} includes {what}")
    assert wrong == []


def test_cuda_kernels_are_seen_through_one_header_and_by_the_gpu_side_alone() -> None:
    """A build without CUDA links none of them; the device seam shares its arguments alone."""
    seam = ("device/", "engine/backend/memory_backend.h")
    wrong = []
    for path in CPP:
        place = path.relative_to(CSRC).as_posix()
        if place.startswith("kernels/cuda/"):
            continue
        for _, what in includes(path):
            if what.startswith("kernels/cuda/") and (
                what != "kernels/cuda/kernels.h"
                or not ("/cuda/" in place or place.startswith(seam))
            ):
                wrong.append(f"{path.relative_to(ROOT)} includes {what}")
    assert wrong == []


def test_transformers_is_imported_only_in_hf_and_lazily_by_command_line_and_tuner() -> None:
    wrong = []
    for path in PYTHON:
        if not inside(path, "kvswap_torch/", "tuning/"):
            continue
        for module, at_import in imports_of(path):
            if module.split(".")[0] != "transformers":
                continue
            lazy = inside(path, "kvswap_torch/cli/", "tuning/") and not at_import
            if not inside(path, "kvswap_torch/hf/") and not lazy:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_nothing_that_the_package_imports_at_once_needs_torch() -> None:
    """`import kvswap_torch` must stay light: follow what it imports at import time."""
    seen: set[str] = set()
    queue = ["kvswap_torch"]
    while queue:
        module = queue.pop()
        path = module_path(module)
        if module in seen or path is None:
            continue
        seen.add(module)
        for name, at_import in imports_of(path):
            assert not at_import or name.split(".")[0] not in ("torch", "transformers"), path
            if at_import and name.startswith("kvswap_torch"):
                queue.append(name)
    assert len(seen) > 3


def module_path(module: str) -> Path | None:
    place = ROOT / Path(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def test_the_package_never_imports_what_stands_above_it() -> None:
    wrong = []
    for path in PYTHON:
        if not inside(path, "kvswap_torch/", "tuning/"):
            continue
        above = ["tests", "bench", "tools", "examples"]
        if not inside(path, "kvswap_torch/cli/", "kvswap_torch/compare/", "tuning/"):
            above += ["kvswap_torch.tuning", "kvswap_torch.compare"]
        wrong += [
            f"{path.relative_to(ROOT)} imports {module}"
            for module, _ in imports_of(path)
            if f"{module}.".startswith(tuple(f"{name}." for name in above))
        ]
    assert wrong == []


def test_the_tuner_is_imported_by_the_name_it_is_installed_under() -> None:
    """By two names it would be two packages, and its classes would differ from themselves."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in PYTHON
        for module, _ in imports_of(path)
        if module.split(".")[0] == "tuning"
    ]
    assert wrong == []
    assert (PACKAGE / "tuning").resolve() == ROOT / "tuning"


def modules_of(path: Path, known: Collection[str]) -> set[str]:
    """Those of the `known` modules that a file imports whenever it runs."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    found = set()
    for node, _ in import_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        for alias in node.names:
            module = source_of(node, package) if isinstance(node, ast.ImportFrom) else alias.name
            within = f"{module}.{alias.name}"
            found.add(within if within in known else module)
    return found & set(known)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that each lead to the next, and the last to the first; empty where there are none."""
    left = dict(graph)
    while ends := [name for name, to in left.items() if not to & left.keys()]:
        for name in ends:
            del left[name]
    if not left:
        return []
    way = [next(iter(left))]
    while way[-1] not in way[:-1]:
        way.append(min(left[way[-1]] & left.keys()))
    return way[way.index(way[-1]) :]


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_imports_lead_nowhere_back() -> None:
    """Also those made late, inside functions; what is imported for its types alone is none."""
    # As packages import them: `kvswap_torch.tuning`, which stands in tuning/.
    names = {}
    for path in PYTHON:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = ("kvswap_torch", *parts) if parts[0] == "tuning" else parts
        names[".".join(parts).removesuffix(".__init__")] = path
    known = {*names, "kvswap_torch._C"}
    assert circle({name: modules_of(path, known) for name, path in names.items()}) == []
    headers = {
        path.relative_to(CSRC).as_posix(): {what for quoted, what in includes(path) if quoted}
        for path in CPP
    }
    assert circle(headers) == []


def knots(graph: dict[str, set[str]]) -> list[list[str]]:
    """Names that all lead to one another, the most first; such of one name are none."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        queue = [name]
        while queue:
            seen |= (new := graph.get(queue.pop(), set()) - seen)
            queue += new
        return seen

    reach = {name: reached(name) for name in graph}
    found = {
        tuple(sorted(other for other in reach[name] if name in reach.get(other, set())))
        for name in graph
    }
    return sorted((list(knot) for knot in found if len(knot) > 1), key=len, reverse=True)


def test_knots_are_found() -> None:
    tied = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert knots(tied) == [["a", "b", "c"], ["d", "e"]]
    assert knots({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def pairs_of(folder: Path) -> dict[str, set[str]]:
    """What a header and its source include together, by their path without what it ends in."""
    graph: dict[str, set[str]] = {}
    for path in sources(folder, ".h", ".cpp", ".cu", ".cuh"):
        name = path.relative_to(CSRC).with_suffix("").as_posix()
        ends = {str(Path(what).with_suffix("")) for quoted, what in includes(path) if quoted}
        graph[name] = graph.get(name, set()) | ends - {name}
    return graph


def test_headers_and_sources_together_make_small_knots_at_most() -> None:
    """What is tied together can only be understood, and changed, together."""
    assert [knot for knot in knots(pairs_of(CSRC)) if len(knot) > KNOT_MAX] == []


def test_a_source_of_the_engine_says_what_its_own_header_declares() -> None:
    """Else a knot of two parts would look like none."""
    paths = {path.relative_to(CSRC).as_posix() for path in sources(CSRC / "engine", ".h", ".cpp")}
    alone = {path for path in paths if str(Path(path).with_suffix(".h")) not in paths}
    assert alone == {"engine/backend/host_backend.cpp"}  # declared in memory_backend.h


def test_parts_of_the_engine_that_are_optional_are_known_to_what_drives_them_alone() -> None:
    """A step selects and reads the same whether tokens are retained, or keys are in clusters."""
    apart = {
        "step": {"retention", "clusters", "prefill", "snapshot", "report"},
        "retention": {"clusters", "snapshot", "report"},
        "clusters": {"retention", "step", "snapshot", "report"},
        "backend": {"sequence", "step", "prefill", "retention", "clusters", "snapshot", "report"},
        "sequence": {"step", "prefill", "retention", "snapshot", "report"},
        "prefill": {"clusters", "snapshot", "report"},
    }
    wrong = [
        f"{path.relative_to(ROOT)} includes {what}"
        for folder, others in apart.items()
        for path in sources(CSRC / "engine" / folder, ".h", ".cpp")
        for _, what in includes(path)
        if what.startswith("engine/") and what.split("/")[1] in others
    ]
    assert wrong == []


def test_words_of_settings_are_read_when_an_engine_is_opened_and_never_again() -> None:
    """Plan has them as numbers and kinds; see csrc/engine/plan.h."""
    words = re.compile(
        r"\bparse_\w+\(|Kind::find\(|\bmethod\(\)|->\s*file_options\(|"
        r"options(?:_|\(\))?\.(?:rows|keeper|grouping|layout|records|heads|score|replacement|"
        r"keep_\w+)\s*[=!]=\s*\""
    )
    opening = {"engine_options", "retention_plan", "plan", "engine_context"}
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources(CSRC / "engine", ".h", ".cpp")
        for line in path.read_text(encoding="utf-8").splitlines()
        if path.stem not in opening and words.search(line)
    ]
    assert wrong == []


def test_nothing_but_the_command_line_knows_the_command_line() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in PYTHON
        if inside(path, "kvswap_torch/") and not inside(path, "kvswap_torch/cli/")
        for module, _ in imports_of(path)
        if module.split(".")[0] in ("typer", "click")
        or (module.startswith("kvswap_torch.cli") and path.name != "__main__.py")
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", ["C++", "Python"])
def test_files_are_short(kind: str) -> None:
    paths = CPP + CPP_TESTS if kind == "C++" else PYTHON
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {
        str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LINES_MAX
    } == {}


def test_python_functions_fit_a_screen() -> None:
    long = {}
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                lines = node.end_lineno - body[0].lineno + 1
                if lines > BODY_LINES_MAX:
                    long[f"{path.relative_to(ROOT)}: {node.name}"] = lines
    assert long == {}


def test_no_file_has_a_name_that_says_nothing() -> None:
    named = [path for path in CPP + CPP_TESTS + PYTHON if path.stem in NAMELESS]
    assert named == []


def test_the_tuner_stays_one_idea_a_file() -> None:
    """A name that begins with another's says that two files share an idea."""
    assert len(list((ROOT / "tuning").glob("*.py"))) <= 33
    names = sorted(path.stem for path in (ROOT / "tuning").iterdir())
    pairs = itertools.pairwise(name for name in names if not name.startswith("__"))
    assert [pair for pair in pairs if pair[1].startswith(pair[0])] == []
