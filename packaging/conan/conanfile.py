"""A Conan 2 recipe of the torch-free library: ``conan create packaging/conan``.

liburing, Highway and nlohmann-json are the system's own; which packages have them Conan is told for
Debian and Fedora. Each may be missing: the library then does without, as its build says.
"""

import re
from pathlib import Path

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy
from conan.tools.system.package_manager import Apt, Dnf

SOURCES = ("CMakeLists.txt", "LICENSE", "cmake/*", "csrc/*", "third_party/*",
           "kvswap_torch/version.py")  # fmt: skip


class Kvswap(ConanFile):
    name = "kvswap"
    package_type = "static-library"
    license = "Apache-2.0 AND BSD-2-Clause"
    description = "A KV cache that lives on disk, on raw pointers"
    settings = "os", "arch", "compiler", "build_type"

    def _root(self) -> Path:
        return Path(self.recipe_folder).parents[1]

    def set_version(self) -> None:
        text = (self._root() / "kvswap_torch" / "version.py").read_text(encoding="utf-8")
        self.version = re.search(r'__version__ = "(.*)"', text)[1]

    def export(self) -> None:
        # set_version() is asked again where the recipe is kept.
        copy(self, "version.py", self._root() / "kvswap_torch",
             Path(self.export_folder).parent / "kvswap_torch")  # fmt: skip

    def export_sources(self) -> None:
        for pattern in SOURCES:
            copy(self, pattern, self._root(), self.export_sources_folder)

    def layout(self) -> None:
        # From a clone the build goes where the others are: one compiler cache has it all.
        in_clone = (self._root() / "csrc").is_dir()
        self.folders.root = "../.." if in_clone else None
        self.folders.build = "build/conan" if in_clone else "build"
        self.folders.generators = f"{self.folders.build}/generators"

    def validate(self) -> None:
        check_min_cppstd(self, 20)

    def system_requirements(self) -> None:
        Apt(self).check(["liburing-dev", "libhwy-dev", "nlohmann-json3-dev"])
        Dnf(self).check(["liburing-devel", "highway-devel", "json-devel"])

    def generate(self) -> None:
        toolchain = CMakeToolchain(self, generator="Ninja")
        toolchain.user_presets_path = False  # none into the clone
        toolchain.cache_variables["KVSWAP_BUILD_TORCH"] = False
        toolchain.cache_variables["KVSWAP_BUILD_TESTS"] = False
        if self.settings.arch == self.settings_build.arch != "x86":
            # -m64 is the compiler's own choice: without it, what other builds compiled is taken.
            toolchain.blocks.remove("arch_flags")
        toolchain.generate()

    def build(self) -> None:
        cmake = CMake(self)
        cmake.configure()
        cmake.build(target="kvswap_core")

    def package(self) -> None:
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, Path(self.package_folder) / "licenses")
        copy(self, "LICENSE", Path(self.source_folder) / "third_party" / "xxhash",
             Path(self.package_folder) / "licenses" / "xxhash")  # fmt: skip

    def package_info(self) -> None:
        # The package's own kvswapConfig.cmake says kvswap::core; Conan writes no other.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["share/cmake/kvswap"]
        self.cpp_info.libs = ["kvswap_core"]
        if (Path(self.package_folder) / "lib" / "liburing.a").is_file():
            self.cpp_info.libs.append("uring")
        self.cpp_info.system_libs = ["pthread"]
