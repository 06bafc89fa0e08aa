"""What ``make wheels`` links against and packs; ``make wheels-check`` tries the wheels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.packaging import check_wheels
from tools.wheels import floor, pack, pythons, torch_files

ROOT = Path(__file__).resolve().parents[2]
READELF = """
Symbol table '.dynsym' contains 9 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND free@GLIBC_2.2.5 (3)
   117: 00000000000845c0   117 FUNC    GLOBAL DEFAULT   15 pthread_create@@GLIBC_2.34
   118: 00000000000845c0   117 FUNC    GLOBAL DEFAULT   15 pthread_create@GLIBC_2.2.5
   119: 00000000000f6f10    34 FUNC    WEAK   DEFAULT   15 stat@@GLIBC_2.33
   120: 00000000001d8750     8 OBJECT  GLOBAL DEFAULT   34 stderr@@GLIBC_2.2.5
   121: 0000000000092000    10 FUNC    GLOBAL DEFAULT   15 __twalk_r@@GLIBC_PRIVATE
   122: 0000000000092010   270 IFUNC   GLOBAL DEFAULT   15 memcpy@@GLIBC_2.14
   123: 0000000000092010   270 FUNC    GLOBAL DEFAULT   15 memcpy@GLIBC_2.2.5
   124: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS GLIBC_2.14@@GLIBC_2.14
"""


def test_of_each_symbol_the_newest_that_is_old_enough() -> None:
    chosen = {each.name: each for each in floor.old_enough(floor.read_symbols(READELF))}
    assert {name: each.version for name, each in chosen.items()} == {
        "pthread_create": "GLIBC_2.2.5",
        "stderr": "GLIBC_2.2.5",
        "memcpy": "GLIBC_2.14",
    }
    assert chosen["stderr"].kind == "OBJECT" and chosen["stderr"].size == 8


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floor")
    floor.make(folder, "g++")
    return folder


def link(folder: Path, stand_ins: Path, code: str) -> Path:
    source, library = folder / "code.cpp", folder / "libcode.so"
    source.write_text(code)
    flags = floor.linker_flags(stand_ins).split()
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wl,--no-undefined", *flags]
    subprocess.run([*command, source, "-o", library], check=True, capture_output=True)
    return library


# Each of these is newer than the floor where it is compiled without it.
NEWER = """
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <memory_resource>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#include <sys/stat.h>
#include <sys/uio.h>

extern "C" int mode_of(const char* path) {
  struct stat told, again;
  if (stat(path, &told) != 0 || lstat(path, &again) != 0) return -1;
  return told.st_ino == again.st_ino ? static_cast<int>(told.st_mode) : -2;
}

extern "C" int waited(int milliseconds) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  const auto begin = std::chrono::steady_clock::now();
  changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [] { return false; });
  const auto took = std::chrono::steady_clock::now() - begin;
  return took >= std::chrono::milliseconds(milliseconds);
}

extern "C" double there_and_back(double value) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof(text), std::exp(value)).ptr;
  std::pmr::unsynchronized_pool_resource pool;
  std::pmr::vector<double> kept(3, std::log(std::stod(std::string(text, end))), &pool);
  double told = 0;
  std::once_flag once;
  std::call_once(once, [&] { std::thread([&] { told = kept[2]; }).join(); });
  return told;
}

extern "C" long read_nothing() { return preadv(-1, nullptr, 0, 0); }

extern "C" int thrown() {
  if (read_nothing() != -1) throw std::runtime_error("read");
  try {
    return static_cast<int>(std::stoi("no number"));
  } catch (const std::invalid_argument&) {
    return 7;
  }
}
"""


def test_what_is_linked_needs_nothing_newer_and_works(stand_ins: Path, tmp_path: Path) -> None:
    library = link(tmp_path, stand_ins, NEWER)
    assert floor.too_new(library) == []
    told = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True).stdout
    asked = {line.split()[-1] for line in told.splitlines() if " U " in line}
    # What every machine has is its own: exceptions pass from library to library.
    assert {
        "__cxa_throw@CXXABI_1.3",
        "preadv@GLIBC_2.10",
    } <= asked or os.uname().machine != "x86_64"
    loaded = ctypes.CDLL(str(library))
    assert loaded.mode_of(str(library).encode()) == library.stat().st_mode
    assert loaded.mode_of(str(tmp_path / "nothing").encode()) == -1
    assert loaded.waited(30) == 1 and loaded.thrown() == 7
    loaded.there_and_back.restype = ctypes.c_double
    assert loaded.there_and_back(ctypes.c_double(1.5)) == pytest.approx(1.5)


def test_without_the_stand_ins_it_would_be_too_new(tmp_path: Path) -> None:
    source, library = tmp_path / "code.cpp", tmp_path / "libcode.so"
    source.write_text(NEWER)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library]
    subprocess.run(command, check=True, capture_output=True)
    assert any(name.startswith("GLIBCXX_3.4.") for name in floor.too_new(library))


def test_what_is_in_neither_does_not_link(stand_ins: Path, tmp_path: Path) -> None:
    code = """
extern "C" int close_range(unsigned, unsigned, int);
int f() { return close_range(9, 9, 0); }
"""
    with pytest.raises(subprocess.CalledProcessError) as failed:
        link(tmp_path, stand_ins, code)
    assert b"undefined reference to `close_range'" in failed.value.stderr


def test_a_wait_goes_on_where_the_machine_has_no_clock_for_it(tmp_path: Path) -> None:
    """As on glibc 2.28: the other clock tells when."""
    program = tmp_path / "program.c"
    program.write_text(
        """
#define _GNU_SOURCE
#define dlsym(where, name) ((void)(where), (void)(name), (void*)0)
#include "OLD_GLIBC"
#include <stdio.h>
int main(void) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  pthread_mutex_lock(&mutex);
  const long long begin = nanoseconds(CLOCK_MONOTONIC), end = begin + 20000000;
  const struct timespec until = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
  int result = 0;
  while (result == 0) result = pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &until);
  return result == ETIMEDOUT && nanoseconds(CLOCK_MONOTONIC) >= end ? 0 : 1;
}
""".replace("OLD_GLIBC", str(ROOT / "tools" / "wheels" / "old_glibc.c"))
    )
    done = tmp_path / "program"
    subprocess.run(
        ["gcc", "-O1", "-Wno-all", "-include", "dlfcn.h", program, "-o", done], check=True
    )
    subprocess.run([done], check=True, timeout=60)


def base_wheel(folder: Path) -> Path:
    """What pip packs of this tree, in little: a module and a library of another build."""
    base = folder / "kvswap_torch-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(base, "w") as made:
        made.writestr("kvswap_torch/__init__.py", "")
        made.writestr("kvswap_torch/_C.cpython-311-x86_64-linux-gnu.so", "old")
        made.writestr("kvswap_torch/lib/old.so", "old")
        info = "kvswap_torch-0.1.0.dist-info"
        made.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.4\nName: kvswap_torch\nVersion: 0.1.0\n"
            "Requires-Dist: torch>=2.11\n",
        )
        made.writestr(f"{info}/RECORD", "")
        made.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux\n",
        )
    return base


def test_a_wheel_gets_its_libraries_tag_licences_and_bill(tmp_path: Path) -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("licences are read where Debian's packages have them")
    base, info = base_wheel(tmp_path), "kvswap_torch-0.1.0.dist-info"
    installed = tmp_path / "installed"
    (installed / "lib").mkdir(parents=True)
    (installed / "lib" / "libkvswap_torch.so").write_text("new")
    (installed / "_C.cpython-313-aarch64-linux-gnu.so").write_text("new")
    wheel = pack.pack(base, installed, "3.13", "aarch64", "2.13.0", ROOT, tmp_path / "dist")
    assert wheel.name == "kvswap_torch-0.1.0-cp313-cp313-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        assert (
            "kvswap_torch/lib/libkvswap_torch.so" in names
            and "kvswap_torch/lib/old.so" not in names
        )
        assert [name for name in names if "/_C" in name] == [
            "kvswap_torch/_C.cpython-313-aarch64-linux-gnu.so"
        ]
        assert "Requires-Dist: torch>=2.13.0\n" in packed.read(f"{info}/METADATA").decode()
        told = packed.read(f"{info}/WHEEL").decode()
        assert told.count("Tag:") == 1 and "Tag: cp313-cp313-manylinux_2_28_aarch64" in told
        bill = json.loads(packed.read(f"{info}/sboms/kvswap_torch.cdx.json"))
        listed = {each["name"]: each["version"] for each in bill["components"]}
        assert set(listed) == {"xxhash", *(part.name for part in pack.PARTS)}
        assert listed["xxhash"] == "0.8.1" and all(listed.values())
        for name in listed:
            assert packed.read(f"{info}/licenses/third_party/{name}.txt")


def test_a_wheel_with_cuda_is_a_local_version(tmp_path: Path) -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("licences are read where Debian's packages have them")
    installed, dist = tmp_path / "installed", tmp_path / "dist"
    (installed / "lib").mkdir(parents=True)
    arguments = (base_wheel(tmp_path), installed, "3.11", "x86_64", "2.13.0", ROOT, dist)
    plain = pack.pack(*arguments)
    labelled = pack.pack(*arguments, "cu130")
    assert labelled.name == "kvswap_torch-0.1.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert not plain.exists(), "one for each Python and processor in a folder"
    with zipfile.ZipFile(labelled) as packed:
        told = packed.read("kvswap_torch-0.1.0+cu130.dist-info/METADATA").decode()
        assert "\nVersion: 0.1.0+cu130\n" in told
        assert "\nRequires-Dist: torch==2.13.*\n" in told
        assert not [name for name in packed.namelist() if "0.1.0.dist-info" in name]


def test_a_wheel_with_cuda_is_tried_with_the_torch_of_the_index() -> None:
    """Not with 2.13.0+cpu of this machine, which pip would prefer."""
    plain = Path("kvswap_torch-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl")
    assert check_wheels.asked_of_pip(plain) == [str(plain)]
    labelled = Path("kvswap_torch-0.1.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl")
    release = torch_files.pinned(ROOT)
    assert check_wheels.asked_of_pip(labelled) == [f"torch==={release}", str(labelled)]
    assert f"{release}+cpu" not in SpecifierSet(f"==={release}")


def test_the_label_is_the_cuda_of_torch(tmp_path: Path) -> None:
    file = tmp_path / "version.py"
    file.write_text(
        "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n"
    )
    assert torch_files.cuda_label(tmp_path) == "cu130"
    file.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    with pytest.raises(torch_files.NotToBeHad, match="needs a torch with CUDA"):
        torch_files.cuda_label(tmp_path)


def test_headers_of_a_python_that_is_nowhere_are_said(monkeypatch, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / ".ci").mkdir(parents=True)
    script = root / ".ci" / "python-headers"
    script.write_text(
        "#!/bin/sh\necho 'python-headers: libpython3.99-dev is nowhere' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    with pytest.raises(
        torch_files.NotToBeHad, match=r"no python3\.99 .*, and python-headers: libpy"
    ):
        pythons.headers("3.99", root, tmp_path)


def test_headers_of_the_running_python_are_found(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if next(pythons.interpreters(version), None) is None:
        pytest.skip("this Python is under no name of its own")
    assert (pythons.headers(version, ROOT, tmp_path) / "Python.h").is_file()


def test_wheels_are_built_for_the_pinned_torch_and_ask_for_it(tmp_path: Path) -> None:
    release = torch_files.pinned(ROOT)
    assert f"torch=={release}\n" in (ROOT / "constraints.txt").read_text()
    if importlib.metadata.version("torch").split("+")[0] == release:
        here = torch_files.folder(release, os.uname().machine, tmp_path)
        assert (here / "include" / "ATen").is_dir() and (here / "version.py").is_file()
    library = tmp_path / "torch-2.0.0-aarch64" / "torch" / "lib" / "libc10.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert torch_files.folder("2.0.0", "aarch64", tmp_path).parent.name == "torch-2.0.0-aarch64"
