"""Builds the libraries with CMake into the package; everything else is in pyproject.toml.

Without --no-build-isolation pip would build against a torch of its own choice, so a missing torch
is said, and so are other things that a build needs, before anything is compiled.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD_DIR = ROOT / "build" / "wheel"


class CleanBuild(build):
    """Stages in a folder of its own, emptied first: a removed file must not return in a wheel."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = str(ROOT / "build" / "staging")

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Configures, builds and installs with CMake, into the wheel or (editable) into the tree."""

    def run(self) -> None:
        if os.environ.get("KVSWAP_PREBUILT") and self.editable_mode:
            return  # `make build` has put the libraries into the tree
        if os.environ.get("KVSWAP_NO_LIBRARIES"):
            return  # tools/wheels builds them for other machines, and puts them in
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                raise SystemExit(f"kvswap_torch: {tool} must be on PATH to build and is not")
        compiler = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
        arguments = os.environ.get("KVSWAP_CMAKE_ARGS", "")
        is_named = any(each in arguments for each in ("CMAKE_CXX_COMPILER", "CMAKE_TOOLCHAIN_FILE"))
        if not is_named and not any(map(shutil.which, compiler)):
            raise SystemExit(
                "kvswap_torch: a C++20 compiler, as g++ 12, must be on PATH to build and is not; "
                f"looked for {', '.join(compiler)}; install g++ or set CXX"
            )
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise SystemExit(
                "kvswap_torch: torch must be installed to build and is not found; install torch, "
                f"then: pip install --no-build-isolation . ({error})"
            ) from error
        package = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "kvswap_torch"
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(BUILD_DIR), "-GNinja"),
            "-DKVSWAP_BUILD_TESTS=OFF",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DKVSWAP_WERROR={os.environ.get('KVSWAP_WERROR', 'OFF')}",
            *os.environ.get("KVSWAP_CMAKE_ARGS", "").split(),
        ]
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(BUILD_DIR), "-j", jobs], check=True)
        subprocess.run(
            ["cmake", "--install", str(BUILD_DIR), "--strip", "--prefix", str(package)], check=True
        )


setup(
    # Named so that the wheel is one for this Python and platform; CMake builds it.
    ext_modules=[Extension("kvswap_torch._C", sources=[])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
)
