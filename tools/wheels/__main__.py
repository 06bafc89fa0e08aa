"""Builds wheels for other machines than this: ``make wheels``.

    python -m tools.wheels [--python 3.11 ...] [--architecture aarch64] [--cuda] [--out FOLDER]

One build of the libraries for each processor, against the torch that is pinned and linked
as manylinux_2_28 wants (floor.py), then a module for each Python. aarch64 is cross-compiled.
``--cuda`` makes wheels with the CUDA kernels, for x86_64 alone: local versions as 0.2.0+cu130, in a
folder of their own, dist/cuda, so that what is in dist/ is one for each Python and processor. What
cannot be had for one wheel (headers, a cross compiler) is said in a line; the others are made, and
the exit status is 1. ``python -m tests.packaging.check_wheels`` tries what was made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.wheels import floor
from tools.wheels.pack import pack
from tools.wheels.pythons import headers, module_suffix
from tools.wheels.torch_files import NotToBeHad, cuda_label, folder, pinned

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}


def run(*command: str | Path, log: Path | None = None) -> None:
    """Runs a command; what it says goes to `log`, and is shown if it fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, text=True,
        stdout=subprocess.PIPE if log else None, stderr=subprocess.STDOUT if log else None,
    )  # fmt: skip
    if log:
        log.write_text(done.stdout)
    if done.returncode:
        raise SystemExit(f"wheels: {command[0]} failed\n{done.stdout or ''}")


def base_wheel() -> Path:
    """All that is not compiled, as pip packs it: with the libraries that are in the tree."""
    place = WORK / "base"
    shutil.rmtree(place, ignore_errors=True)
    environment = os.environ | {"KVSWAP_NO_LIBRARIES": "1"}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    command += ["--no-deps", "--no-build-isolation", "-w", str(place), str(ROOT)]
    if subprocess.run(command, env=environment, cwd=ROOT).returncode:
        raise SystemExit("wheels: pip wheel failed")
    (made,) = place.glob("*.whl")
    return made


def configure(architecture: str, release: str, cuda: bool) -> tuple[Path, str]:
    """The build folder of a processor, with the stand-ins to link against; the CUDA's label."""
    # As deep as the other build folders are: the compiler cache then has most of it.
    build = ROOT / "build" / f"wheels-{architecture}{'-cuda' if cuda else ''}"
    compiler = COMPILERS[architecture]
    if shutil.which(compiler) is None:
        raise NotToBeHad(f"{architecture}: needs {compiler}, which is not on PATH; as root run: "
                         ".ci/aarch64")  # fmt: skip
    torch = folder(release, architecture, WORK / "downloads", cuda)
    label = cuda_label(torch) if cuda else ""
    floor.make(build / "floor", compiler)
    flags = floor.linker_flags(build / "floor")
    arguments = [
        f"-DKVSWAP_TORCH_ROOT={torch}",
        f"-DKVSWAP_CUDA={'ON' if cuda else 'OFF'}", "-DKVSWAP_BUILD_TESTS=OFF",
        f"-DCMAKE_SHARED_LINKER_FLAGS={flags}", f"-DCMAKE_MODULE_LINKER_FLAGS={flags}",
    ]  # fmt: skip
    if architecture == "aarch64":
        run(ROOT / ".ci" / "aarch64", log=WORK / "aarch64-packages.log")
        arguments.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64.cmake'}")
    (build / "arguments").write_text("\n".join(arguments))
    return build, label


def install(build: Path, version: str, architecture: str, jobs: int) -> Path:
    """Builds for one Python; the folder with what goes into the package."""
    include = headers(version, ROOT, WORK / "downloads")
    command = ["cmake", "-S", str(ROOT), "-B", str(build), "-GNinja"]
    command += (build / "arguments").read_text().splitlines()
    suffix = module_suffix(version, architecture)
    command += [f"-DKVSWAP_PYTHON_INCLUDE={include}", f"-DKVSWAP_PYTHON_SUFFIX={suffix}"]
    run(*command, log=build / "configure.log")
    run("cmake", "--build", build, "-j", str(jobs), "--target", "libraries",
        log=build / "build.log")  # fmt: skip
    to = build / f"installed-{version}"
    shutil.rmtree(to, ignore_errors=True)
    run("cmake", "--install", build, "--strip", "--prefix", to, log=build / "install.log")
    tools = COMPILERS[architecture].removesuffix("g++")
    run(f"{tools}strip", "--strip-debug", to / "lib" / "libkvswap_core.a")
    for library in (to / "lib" / "libkvswap_torch.so", to / f"_C{suffix}"):
        if newer := floor.too_new(library, f"{tools}readelf"):
            raise SystemExit(f"wheels: {library.name} must need nothing newer than manylinux_2_28 "
                             f"has, needs {', '.join(newer)}")  # fmt: skip
    return to


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.wheels", description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.11")
    parser.add_argument("--architecture", nargs="+", default=["x86_64"], choices=COMPILERS)
    parser.add_argument("--cuda", action="store_true", help="with the CUDA kernels; needs nvcc")
    parser.add_argument("--out", type=Path, help="default: dist, or dist/cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.cuda and asked.architecture != ["x86_64"]:
        parser.error("--cuda must be for x86_64 alone: no other nvcc is known to this tool")
    out = asked.out or ROOT / "dist" / ("cuda" if asked.cuda else "")
    WORK.mkdir(parents=True, exist_ok=True)
    release, missing = pinned(ROOT), 0
    base = base_wheel()
    for architecture in asked.architecture:
        try:
            build, label = configure(architecture, release, asked.cuda)
        except NotToBeHad as why:
            print(f"wheels: none for {architecture}: {why}")
            missing += 1
            continue
        for version in asked.python:
            try:
                installed = install(build, version, architecture, asked.jobs)
            except NotToBeHad as why:
                print(f"wheels: none for Python {version} on {architecture}: {why}")
                missing += 1
                continue
            made = pack(base, installed, version, architecture, release, ROOT, out, label)
            print(f"wheels: {made.name}, for torch {release} and newer", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
