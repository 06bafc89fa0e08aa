"""Builds the wheel, installs it in a fresh environment, imports it and links a C++ program to it.

Run by ``make wheel-check``. The environment borrows this one's torch by a link, so that the
libraries find it where a pip install would have put it: beside them.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from tools.wheels.pythons import interpreters

ROOT = Path(__file__).resolve().parents[2]
CONSUMERS = Path(__file__).resolve().parent
PROBE = """
import json, sys
import kvswap_torch
assert not {"torch", "transformers", "typer"} & set(sys.modules), "import must stay light"
from kvswap_torch.native import PACKAGE_DIR, build_info, require_library
assert PACKAGE_DIR.is_relative_to(sys.prefix), PACKAGE_DIR
import torch
torch.ops.load_library(require_library())
from kvswap_torch import _C
json.dump(build_info(), sys.stdout)
"""
PIP = ("-m", "pip", "--disable-pip-version-check")
TUNER_PROBE = """
import sys
import kvswap_torch.tuning.documents as default
assert default.TEXT.is_relative_to(sys.prefix) and len(default.shipped_texts()) > 10, default.TEXT
assert (default.TEXT.parent / "LICENSE.txt").is_file()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command; its output, or an end with it."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
        *("-w", folder, ROOT),
        cwd=ROOT,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" not in name}
    if tops != {"kvswap_torch"}:
        sys.exit(f"{wheel.name}: must hold kvswap_torch alone, holds {sorted(tops)}")
    return wheel


def make_environment(
    folder: Path, wheel: Path, *flags: str, pip_of: str | Path = sys.executable
) -> Path:
    """A new environment with the wheel and this one's packages; returns its Python.

    `flags` are pip's, as a folder of sources in the wheel's place needs them.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    here = Path(sysconfig.get_path("purelib"))
    there = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
        ).strip()
    )
    (there / "torch").symlink_to(here / "torch")
    # What is not linked is found through a path file, after what is installed there.
    (there / "borrowed.pth").write_text(f"{here}\n")
    run(
        *(pip_of, "-m", "pip", "install", "-q", "--no-deps", "--no-index"),
        *("--target", there, *flags, wheel),
        cwd=folder,
    )
    return python


def new_environment(version: str, folder: Path) -> Path:
    """A new environment of that Python, without this one's packages; returns its Python."""
    # A shim of pyenv may be on PATH for a Python that is not chosen, and then ends with 127.
    runs = (each for each in interpreters(version)
            if subprocess.run([each, "-c", ""], capture_output=True).returncode == 0)  # fmt: skip
    found = next(runs, None)
    if found is None:
        sys.exit(f"wheels-check: --bare {version} needs python{version}, which is not here")
    subprocess.run([found, "-m", "venv", folder / "env"], check=True)
    return folder / "env" / "bin" / "python"


def check_libraries(python: Path, folder: Path) -> None:
    package = run(
        python, "-c", "import kvswap_torch; print(kvswap_torch.__path__[0])", cwd=folder
    ).strip()
    for library in [*Path(package).glob("_C*.so"), Path(package) / "lib" / "libkvswap_torch.so"]:
        # libpython's symbols come from the program, and libtorch_python must not be needed by lib/.
        needed = run("ldd", library, cwd=folder)
        missing = [line.strip() for line in needed.splitlines() if "not found" in line]
        if missing:
            sys.exit(f"{library.name}: every library must be found, missing: {missing}")
        if library.parent.name == "lib" and "torch_python" in needed:
            sys.exit(f"{library.name}: must not need libtorch_python")


def check_tuner(python: Path, folder: Path) -> None:
    """The tuner and its text are in the wheel, and its command starts."""
    run(python, "-c", TUNER_PROBE, cwd=folder)
    told = run(python, "-m", "kvswap_torch", "tune", "--help", cwd=folder)
    if "--max-context" not in told:
        sys.exit(f"kvswap tune --help: must name --max-context, got\n{told}")


def check_consumer(python: Path, folder: Path, name: str) -> str:
    """Builds and runs a C++ program against what was installed, with and without a config."""
    prefix = run(python, "-m", "kvswap_torch", "cmake-prefix", cwd=folder).strip()
    if name == "consumer":
        prefix += (
            ";"
            + run(
                python, "-c", "import torch; print(torch.utils.cmake_prefix_path)", cwd=folder
            ).strip()
        )
    build = folder / f"{name}-build"
    configure = ["cmake", "-GNinja", "-S", CONSUMERS / name, "-B", build]
    if name != "consumer":
        # The neighbour in site-packages must not be found: this program does without.
        configure.append("-DCMAKE_DISABLE_FIND_PACKAGE_Torch=ON")
    run(*configure, f"-DCMAKE_PREFIX_PATH={prefix}", cwd=folder)
    run("cmake", "--build", build, cwd=folder)
    config = folder / "config.json"
    save = f"from kvswap_torch import SwapConfig; SwapConfig(rank=8).save({str(config)!r})"
    run(python, "-c", save, cwd=folder)
    run(build / name, folder, config, cwd=folder)
    return run(build / name, folder, cwd=folder)


def check_core_needs_nothing(folder: Path) -> None:
    needed = run("ldd", folder / "consumer_core-build" / "consumer_core", cwd=folder)
    if "torch" in needed or "python" in needed:
        sys.exit(f"consumer_core: must need neither torch nor Python, needs:\n{needed}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvswap-wheel-") as name:
        folder = Path(name)
        wheel = build_wheel(folder / "dist")
        python = make_environment(folder / "env", wheel)
        print("wheel-check: built with", run(python, "-c", PROBE, cwd=folder))
        check_libraries(python, folder)
        check_tuner(python, folder)
        shutil.rmtree(folder / "dist")
        for name in ("consumer", "consumer_core"):
            print(f"wheel-check: {name} says:", check_consumer(python, folder, name).strip())
        check_core_needs_nothing(folder)


if __name__ == "__main__":
    main()
