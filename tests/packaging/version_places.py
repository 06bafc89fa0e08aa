"""Where a torch, an environment and fitting libraries for it come from: for `version_matrix`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.wheels import pythons

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "version-matrix"
OWN_PYTHON = "{}.{}".format(*sys.version_info[:2])
# Of torch's requirements: what its libraries are linked to. Its compiler is not needed.
CUDA = re.compile(r"^Requires-Dist: ((?:nvidia|cuda-toolkit)[^;\n]*)", re.MULTILINE)
PIP = ("-m", "pip", "--disable-pip-version-check")
LINES_SHOWN = 12  # of a command that failed; pip says why before it says what to read
# No pip cache: it would keep a copy of the gigabytes that are removed after a row.
INSTALL = (*PIP, "install", "--no-cache-dir", "--no-compile")
# The package itself refuses to be imported with a torch that it does not fit.
FIT = """
import json, sys, types
package = types.ModuleType("kvswap_torch")
package.__path__ = ["kvswap_torch"]
sys.modules["kvswap_torch"] = package
from kvswap_torch import native
needed, lacking = native._torch_symbols()
try:
    native.check_torch()
    refused = ""
except ImportError as error:
    refused = str(error)
print(json.dumps({"built_for": native.build_info()["torch"], "needed": needed,
                  "lacking": len(lacking), "refused": refused}))
"""


class CannotRunError(Exception):
    """Something that a cell needs is not there; says what and why."""


@dataclass(frozen=True)
class Environment:
    """An interpreter, folders that come before its packages, and the tree that it runs."""

    python: str
    paths: tuple[Path, ...]
    tree: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, self.paths))
        added = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [self.python, *arguments], cwd=self.tree, env=os.environ | added, text=True,
            capture_output=True,
        )  # fmt: skip

    def ask(self, code: str) -> Any:
        """What a program prints as JSON in its last line.

        Raises
        ------
        CannotRunError
            It failed.
        """
        done = self.run("-c", code)
        if done.returncode:
            raise CannotRunError((done.stderr.strip().splitlines() or ["python failed"])[-1])
        return json.loads(done.stdout.splitlines()[-1])


def run(*command: str | Path, log: Path | None = None) -> None:
    """Runs a command, its output into `log`.

    Raises
    ------
    CannotRunError
        It failed; says its last lines.
    """
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    if log is not None:
        log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        told = "\n".join(done.stdout.strip().splitlines()[-LINES_SHOWN:])
        raise CannotRunError(
            f"{' '.join(map(str, command[:4]))} ended with {done.returncode}\n{told}"
        )


def interpreter(version: str) -> str:
    """Python of that version with the pinned packages: this one, or that of a new environment."""
    if version == OWN_PYTHON:
        return sys.executable
    folder = WORK / f"environment-{version}"
    python = folder / "bin" / "python"
    if (folder / "complete").is_file():
        return str(python)
    found = next((each for each in pythons.interpreters(version) if _has_headers(each)), None)
    if found is None:
        raise CannotRunError(
            f"Python {version}: must be on PATH or below ~/.pyenv, with its headers"
        )
    shutil.rmtree(folder, ignore_errors=True)
    run(found, "-m", "venv", folder)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines()
            if not line.startswith(("#", "torch=="))]  # fmt: skip
    wanted = folder / "packages.txt"
    wanted.write_text("\n".join(pins) + "\n")
    run(python, *INSTALL, "--no-deps", "-r", wanted)
    (folder / "complete").touch()
    return str(python)


def _has_headers(python: str) -> bool:
    done = subprocess.run([python, "-c", pythons.ASK], text=True, capture_output=True)
    return done.returncode == 0 and (Path(done.stdout.strip()) / "Python.h").is_file()


def own_torch() -> str:
    """This environment's release; imports nothing."""
    import importlib.metadata

    return importlib.metadata.version("torch").split("+")[0]


def torch_folder(release: str, python: str) -> Path:
    """Where ``torch`` of that release is found, with the CUDA libraries that it is linked to."""
    if release == own_torch() and python == OWN_PYTHON:
        return own_packages()
    folder = WORK / f"torch-{release}-{_tag(python)}"
    if folder.is_dir():
        return folder
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as name:
        target = Path(name) / "packages"
        install = (interpreter(python), *INSTALL, "--target", target)
        run(*install, "--no-deps", f"torch=={release}")
        (metadata,) = target.glob("torch-*.dist-info/METADATA")
        if libraries := [each.strip() for each in CUDA.findall(metadata.read_text())]:
            run(*install, *libraries)
        target.rename(folder)
    return folder


def own_packages() -> Path:
    import sysconfig

    return Path(sysconfig.get_path("purelib"))


def remove_torch(release: str, python: str) -> None:
    shutil.rmtree(WORK / f"torch-{release}-{_tag(python)}", ignore_errors=True)


def _tag(python: str) -> str:
    return f"cp{python.replace('.', '')}"


def paths(torch: Path, *before: Path) -> tuple[Path, ...]:
    """Folders for PYTHONPATH; this environment's own packages are found without."""
    return before if torch == own_packages() else (*before, torch)


def fit_of_present_libraries(torch: Path) -> dict[str, Any]:
    """Whether the libraries in this tree load with that torch, and by how many symbols."""
    return Environment(sys.executable, paths(torch), ROOT).ask(FIT)


def built_tree(release: str, python: str, jobs: int) -> Path:
    """A copy of this tree with libraries built for that torch and Python."""
    torch = torch_folder(release, python)
    # As deep as the other build folders are: the compiler cache then has the torch-free part.
    build = ROOT / "build" / f"matrix-{release}-{_tag(python)}"
    settings = [
        "-DKVSWAP_BUILD_TESTS=OFF", "-DKVSWAP_CUDA=OFF", "-DPython_FIND_VIRTUALENV=ONLY",
        f"-DPython_EXECUTABLE={interpreter(python)}", f"-DKVSWAP_TORCH_ROOT={torch / 'torch'}",
    ]  # fmt: skip
    run("cmake", "-S", ROOT, "-B", build, "-GNinja", *settings,
        log=WORK / f"configure-{release}.log")  # fmt: skip
    run("cmake", "--build", build, "-j", str(jobs), "--target", "libraries",
        log=WORK / f"build-{release}.log")  # fmt: skip
    tree = WORK / f"tree-{release}-{_tag(python)}"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if not (ROOT / name).exists():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    run("cmake", "--install", build, "--prefix", tree / "kvswap_torch")
    return tree


def build_example(tree: Path, torch: Path) -> None:
    """examples/libtorch of that tree, found as a program outside of it finds what is installed."""
    build = tree / "build" / "libtorch"
    places = f"{tree / 'kvswap_torch' / 'share' / 'cmake'};{torch / 'torch'}"
    run("cmake", "-S", tree / "examples" / "libtorch", "-B", build, "-GNinja",
        f"-DCMAKE_PREFIX_PATH={places}")  # fmt: skip
    run("cmake", "--build", build)
