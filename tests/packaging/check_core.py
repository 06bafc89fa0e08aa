"""Installs the torch-free library into a prefix and builds a program against it, in every way.

    python -m tests.packaging.check_core [--conan]

is what ``make core-check`` runs: by ``find_package(kvswap)`` and by pkg-config from a prefix that
was moved after it was installed, and with --conan by the recipe in packaging/conan, in a Conan home
of its own. The program is tests/packaging/consumer_core; on a wrong folder it must end with a
sentence.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSUMER = ROOT / "tests" / "packaging" / "consumer_core"
BUILD = ROOT / "build" / "core"
FLAGS = ("-GNinja", "-DKVSWAP_BUILD_TORCH=OFF")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command; its output, or an end with it."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | environment, text=True,
        capture_output=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"core-check: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_program(program: Path, folder: Path, how: str) -> None:
    told = run(program, folder).strip()
    if "300 tokens kept in" not in told:
        sys.exit(f"core-check: {how}: the program must keep 300 tokens, says {told!r}")
    wrong = subprocess.run([program, folder / "nowhere"], text=True, capture_output=True)
    lines = wrong.stderr.strip().splitlines()
    if wrong.returncode != 1 or len(lines) != 1 or "nowhere" not in lines[0]:
        sys.exit(f"core-check: {how}: a wrong folder must end with 1 and a sentence, got "
                 f"{wrong.returncode} and {wrong.stderr!r}")  # fmt: skip
    needed = run("ldd", program)
    if "torch" in needed or "python" in needed:
        sys.exit(f"core-check: {how}: must need neither torch nor Python, needs\n{needed}")
    print(f"core-check: {how}: {told}; on a wrong folder: {lines[0]}", flush=True)


def install(folder: Path) -> Path:
    """The prefix, moved: a package must not remember where it was."""
    if not (BUILD / "build.ninja").is_file():
        run("cmake", "-S", ROOT, "-B", BUILD, *FLAGS)
    run("cmake", "--build", BUILD, "--target", "kvswap_core")
    run("cmake", "--install", BUILD, "--prefix", folder / "first")
    shutil.move(folder / "first", folder / "prefix")
    return folder / "prefix"


def by_cmake(prefix: Path, folder: Path) -> Path:
    build = folder / "by-cmake"
    run("cmake", "-GNinja", "-S", CONSUMER, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", build)
    return build / "consumer_core"


def by_pkg_config(prefix: Path, folder: Path) -> Path:
    path = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "kvswap", **path).split()
    version = run("pkg-config", "--modversion", "kvswap", **path).strip()
    if f'__version__ = "{version}"' not in (ROOT / "kvswap_torch" / "version.py").read_text():
        sys.exit(f"core-check: pkg-config must tell the version, tells {version}")
    program = folder / "by-pkg-config"
    run("g++", "-std=c++20", "-O1", CONSUMER / "main.cpp", *flags, "-o", program)
    return program


def by_conan(folder: Path) -> Path:
    """The recipe's local flow: what it builds in this clone is packaged, and found from there."""
    conan, home = shutil.which("conan"), {"CONAN_HOME": str(folder / "conan-home")}
    if conan is None:
        sys.exit("core-check: --conan needs conan on PATH; run: pip install conan")
    run(conan, "profile", "detect", **home)
    settings = ["-s", "compiler.cppstd=20", "-s", "build_type=RelWithDebInfo"]
    recipe = ROOT / "packaging" / "conan"
    run(conan, "build", recipe, *settings, **home)
    run(conan, "export-pkg", recipe, *settings, **home)
    version = json.loads(run(conan, "inspect", recipe, "--format=json", **home))["version"]
    generated, build = folder / "generated", folder / "by-conan"
    wanted = [f"--requires=kvswap/{version}", "-g", "CMakeToolchain", "-g", "CMakeDeps"]
    # Conan writes presets for who calls it into the folder that it is called in.
    run(conan, "install", *wanted, *settings, "--output-folder", generated, cwd=folder, **home)
    run("cmake", "-GNinja", "-S", CONSUMER, "-B", build, "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DCMAKE_TOOLCHAIN_FILE={generated / 'conan_toolchain.cmake'}")  # fmt: skip
    run("cmake", "--build", build)
    return build / "consumer_core"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvswap-core-") as name:
        folder = Path(name)
        prefix = install(folder)
        check_program(by_cmake(prefix, folder), folder, "find_package")
        check_program(by_pkg_config(prefix, folder), folder, "pkg-config")
        if "--conan" in sys.argv[1:]:
            check_program(by_conan(folder), folder, "conan")


if __name__ == "__main__":
    main()
