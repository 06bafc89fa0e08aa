"""Compiles all that includes torch against the ends of the range promised, its syntax alone.

    python -m tests.packaging.oldest_torch [oldest] [newest] [--may-skip]

is what ``make oldest-torch`` and ``make newest-torch`` run. The headers come once, into
build/oldest-torch, from the smallest wheel of a release (80 and 139 MB: the one for macOS, with the
headers of CUDA's part too); nothing of it is linked or run. The files of a folder are compiled as
one, which takes a tenth of the time; where they cannot be, since two use one name, or where one is
wrong, each is compiled by itself.

With --may-skip, as in ``make test`` outside of CI, headers that cannot be had are said in one line.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "2.15.0"  # that was tested: pyproject.toml's range has no end
# torch's wheels for macOS are of 11 until 2.11 and of 14 since.
WHEEL_OF = ("--platform", "macosx_11_0_arm64", "--platform", "macosx_14_0_arm64",
            "--python-version", "3.11")  # fmt: skip
# What a build defines where it matters; the CUDA glue finds no configured header of c10/cuda.
DEFINES = ("TORCH_EXTENSION_NAME=_C", "KVSWAP_HAS_CUDA=0", "C10_CUDA_NO_CMAKE_CONFIGURE_FILE")


class NotToBeHad(Exception):
    """The headers cannot be fetched; says why."""


def oldest() -> str:
    """The release that pyproject.toml's range begins with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (begin,) = (
        found[1]
        for line in project["dependencies"]
        if (found := re.match(r"torch>=([\d.]+)", line))
    )
    return begin if begin.count(".") == 2 else f"{begin}.0"


def download(release: str, folder: str) -> None:
    """That torch's wheel into `folder`; NotToBeHad with pip's reason."""
    pip = [*(sys.executable, "-m", "pip", "--disable-pip-version-check"), "download", "-q"]
    pip += ["--retries", "2", "--no-deps", "--only-binary", ":all:", *WHEEL_OF, "-d", folder]
    # pip's files of settings may limit torch to releases older than the one to test.
    for environment in ({}, {"PIP_CONFIG_FILE": os.devnull}):
        done = subprocess.run(
            [*pip, f"torch=={release}"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            return
    told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    raise NotToBeHad(told[-1] if told else f"pip ended with {done.returncode}")


def headers(release: str) -> Path:
    """The folder ``include`` of that torch, fetched if it is not there."""
    folder = ROOT / "build" / "oldest-torch" / release
    if folder.is_dir():
        return folder / "torch" / "include"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        print(f"oldest-torch: fetching torch {release} for its headers (once)", flush=True)
        download(release, name)
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            wanted = [each for each in packed.namelist() if each.startswith("torch/include/")]
            packed.extractall(Path(name) / "unpacked", wanted)
        (Path(name) / "unpacked").rename(folder)
    return folder / "torch" / "include"


def cuda_headers() -> Path | None:
    """The toolkit's: beside its nvcc, or in the usual place where nvcc is a script elsewhere."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    for home in [*homes, "/usr/local/cuda"]:
        if home and (Path(home) / "include" / "cuda_runtime_api.h").is_file():
            return Path(home) / "include"
    return None


def compile_one(source: Path, flags: list[str]) -> str:
    """What the compiler says; nothing where it has no objection."""
    command = [os.environ.get("CXX", "g++"), *flags, "-fsyntax-only", str(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr


def compile_all(parts: list[list[Path]], flags: list[str], scratch: Path) -> list[str]:
    """Errors of all files: a part at once, and one by one if that fails."""
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        joined = []
        for number, part in enumerate(parts):
            joined.append(scratch / f"part_{number}.cpp")
            joined[-1].write_text("".join(f'#include "{path}"\n' for path in part))
        verdicts = list(pool.map(lambda path: compile_one(path, flags), joined))
        doubtful = [
            path for part, told in zip(parts, verdicts, strict=True) if told for path in part
        ]
        return [told for told in pool.map(lambda path: compile_one(path, flags), doubtful) if told]


def check(release: str) -> int:
    """How many files are wrong against that torch; NotToBeHad where it cannot be fetched."""
    include = headers(release)
    system = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
    parts = [sorted(ROOT.glob(f"csrc/{folder}/*.cpp")) for folder in ("torch", "python")]
    toolkit = cuda_headers()
    if toolkit is not None:
        system.append(toolkit)
        glue = [*ROOT.glob("csrc/torch/cuda/*.cpp"), *ROOT.glob("csrc/device/cuda/*.cpp")]
        parts.append(sorted(glue))
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", f"-I{ROOT}/csrc"]
    flags += [f"-D{name}" for name in DEFINES]
    for folder in system:
        flags += ["-isystem", str(folder)]
    with tempfile.TemporaryDirectory() as scratch:
        errors = compile_all(parts, flags, Path(scratch))
    print(*errors, sep="\n", end="")
    count = sum(map(len, parts))
    without = "" if toolkit else "; without the CUDA glue, since there is no toolkit"
    print(f"oldest-torch: {count} files against torch {release}, {len(errors)} wrong{without}")
    return len(errors)


def main(arguments: list[str]) -> int:
    ends = {"oldest": oldest(), "newest": NEWEST}
    asked = [name for name in arguments if name != "--may-skip"]
    if unknown := sorted(set(asked) - set(ends)):
        print(f"oldest-torch: must be asked for oldest or newest, got {', '.join(unknown)}")
        return 2
    failed = 0
    for name in asked or ends:
        try:
            failed |= check(ends[name]) > 0
        except NotToBeHad as why:
            if "--may-skip" in arguments:
                print(f"oldest-torch: skipped, torch {ends[name]} is not to be had ({why}); when "
                      f"it is: make {name}-torch")  # fmt: skip
                continue
            print(f"oldest-torch: torch {ends[name]} must be fetched and cannot be: {why}")
            failed = 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
