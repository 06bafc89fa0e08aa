"""Tries the wheels of ``make wheels``: tags, contents, and an answer without a compiler.

    python -m tests.packaging.check_wheels [dist] [--bare 3.11 ...] [--cuda]
    python -m tests.packaging.check_wheels --debian testing | --emulated
    python -m tests.packaging.check_wheels --sdist [--bare 3.12 ...]

is what ``make wheels-check`` runs. Every wheel must be consistent with manylinux_2_28, as
auditwheel sees it, and bring its licences and its bill of materials. The one for this Python is
installed beside this environment's packages, and README's lines of Python must answer rightly there
with no compiler on PATH. ``--bare 3.12`` does so in a new environment into which pip brings
everything, torch too: gigabytes, so it is asked for. ``--cuda`` tries the wheels with CUDA, on the
CPU where there is no device. ``--debian`` does the same with a bare Debian's own Python
(check_debian.py). ``--emulated`` runs tests with the one for Arm (check_emulated.py).
``--sdist`` builds ``make sdist``'s file instead (check_sdist.py), with this environment's tools or
in new ones. README's lines must answer within LIMIT seconds, in each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.first_hour.debian import ALL_RELEASES
from tests.first_hour.typist import Began
from tests.packaging import check_debian, check_emulated, check_sdist
from tests.packaging.check_wheel import (
    PIP,
    PROBE,
    check_libraries,
    make_environment,
    new_environment,
    run,
)
from tests.packaging.run_docs import ROOT, readme_program
from tools.wheels.torch_files import pinned

LIMIT = 30.0
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

# After README's lines: what they are to have come to, and by which package.
AFTER = """
assert tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]).strip() == "copper lantern"
import pathlib, sys
import kvswap_torch
assert pathlib.Path(kvswap_torch.__file__).is_relative_to(sys.prefix), kvswap_torch.__file__
"""


def say(text: str) -> None:
    print(f"wheels-check: {text}", flush=True)


def auditwheel() -> list[str] | None:
    """The command, of this environment or on PATH."""
    asked = [sys.executable, "-c", "import auditwheel"]
    if subprocess.run(asked, capture_output=True).returncode == 0:
        return [sys.executable, "-m", "auditwheel"]
    found = shutil.which("auditwheel")
    return None if found is None else [found]


def audited(wheel: Path, command: list[str]) -> str:
    """The policy that the wheel's symbols allow, as auditwheel tells."""
    done = subprocess.run([*command, "show", str(wheel)], capture_output=True, text=True)
    told = " ".join((done.stdout + done.stderr).split())
    found = re.search(r'constrains the platform tag to "(\w+)"', told)
    if done.returncode or found is None:
        sys.exit(f"wheels-check: auditwheel show {wheel.name}:\n{done.stdout}{done.stderr}")
    return found[1]


def check_contents(wheel: Path) -> None:
    """Libraries for the tag's processor and Python, licences, bill of materials."""
    python, _, platform = wheel.stem.split("-")[2:]
    architecture = platform.removeprefix("manylinux_2_28_")
    module = f"kvswap_torch/_C.cpython-{python[2:]}-{architecture}-linux-gnu.so"
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        wanted = {module, "kvswap_torch/lib/libkvswap_torch.so", "kvswap_torch/lib/liburing.a",
                  "kvswap_torch/lib/libkvswap_core.a", f"{info}/sboms/kvswap_torch.cdx.json",
                  *(f"{info}/licenses/third_party/{name}.txt" for name in
                    ("highway", "libstdc++", "liburing", "nlohmann-json", "xxhash"))}  # fmt: skip
        if missing := sorted(wanted - names):
            sys.exit(f"wheels-check: {wheel.name} must have {missing}")
        modules = [name for name in names if re.fullmatch(r"kvswap_torch/_C\..*\.so", name)]
        if modules != [module]:
            sys.exit(f"wheels-check: {wheel.name} must have {module} alone, has {modules}")
        built = json.loads(packed.read("kvswap_torch/lib/build_info.json"))
        machine = packed.read(module)[18]
    if {built[name] for name in ("liburing", "highway", "xxhash", "json")} != {1}:
        sys.exit(f"wheels-check: {wheel.name} must be built with everything, got {built}")
    if built["cuda"] != ("+cu" in wheel.name):
        sys.exit(f"wheels-check: {wheel.name} must have CUDA kernels as its name says, got {built}")
    if machine != {"x86_64": 62, "aarch64": 183}[architecture]:
        sys.exit(f"wheels-check: {module} must be for {architecture}, is for machine {machine}")


def answer(python: Path, folder: Path) -> tuple[float, float]:
    """Seconds of README's lines there, without a compiler on PATH, and of a processor."""
    (folder / "empty").mkdir(exist_ok=True)
    program = folder / "readme.py"
    program.write_text(readme_program() + AFTER)
    outside = ("PATH", "PYTHONPATH", "CC", "CXX", "CUDA_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in outside}
    began = Began()
    # A program's own folder is where it imports from, not the clone's that it runs in.
    done = subprocess.run(
        [python, program], cwd=ROOT, text=True,
        env=kept | {"PATH": str(folder / "empty")}, capture_output=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"wheels-check: README's lines\n{done.stdout}{done.stderr}")
    return began.seconds(), began.processor_seconds()


def asked_of_pip(wheel: Path) -> list[str]:
    """What a user of that wheel names to pip."""
    if "+cu" not in wheel.name:
        return [str(wheel)]
    # Three signs of equality: 2.13.0+cpu, which may lie on this machine, is another one.
    return [f"torch==={pinned(ROOT)}", str(wheel)]


def bare(version: str, wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel and what pip brings with it."""
    python = new_environment(version, folder)
    subprocess.run([python, *PIP, "install", "-q", *asked_of_pip(wheel)], check=True)
    return python


def try_lines(version: str, python: Path, folder: Path) -> None:
    """README's lines, within the limit; a first run also writes what Python compiles of torch."""
    told = run(python, "-c", PROBE, cwd=folder)
    within(answer(python, folder), f"Python {version}: built with {told}")


def within(took: tuple[float, float], what: str) -> None:
    seconds, processor = took
    say(f"{what}: README's lines answer in {seconds:.0f} s, {processor:.0f} s of a processor")
    if seconds > LIMIT:
        load = os.getloadavg()[0]
        sys.exit(f"wheels-check: README's lines must answer in {LIMIT:.0f} s, took {seconds:.0f}; "
                 f"the machine's load is {load:.1f} on {os.cpu_count()} cores")  # fmt: skip


def try_sdist(source: Path, bare: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvswap-sdist-") as name:
        say(check_sdist.without_compiler(source, Path(name)))
    for version in bare or [HERE]:
        with tempfile.TemporaryDirectory(prefix="kvswap-sdist-") as name:
            folder = Path(name)
            python, told = check_sdist.built(source, version if bare else None, folder)
            say(told)
            try_lines(version, python, folder)


def try_wheels(dist: Path, wheels: list[Path], versions: list[str]) -> None:
    """In new environments of `versions`; with none of them beside this environment's packages."""
    fitting = {
        version: [wheel for wheel in wheels if f"-cp{version.replace('.', '')}-" in wheel.name
                  and wheel.stem.endswith(os.uname().machine)]
        for version in versions or [HERE]
    }  # fmt: skip
    for version, found in fitting.items():
        if len(found) != 1:
            sys.exit(f"wheels-check: {dist} must have one wheel for Python {version} on this "
                     f"processor, has {len(found)}")  # fmt: skip
    for version, (wheel,) in fitting.items():
        with tempfile.TemporaryDirectory(prefix="kvswap-wheels-") as name:
            folder = Path(name)
            if versions:
                python = bare(version, wheel, folder)
            else:
                python = make_environment(folder / "env", wheel)
                check_libraries(python, folder)
            try_lines(version, python, folder)


def check_all(wheels: list[Path], *, may_skip: bool) -> None:
    """Contents and policy of each; without auditwheel, where that may be, contents alone."""
    command = auditwheel()
    if command is None and not may_skip:
        sys.exit("wheels-check: needs auditwheel; run: pip install 'kvswap_torch[wheels]'")
    for wheel in wheels:
        check_contents(wheel)
        if command is None:
            say(f"{wheel.name}: contents right; auditwheel is not here")
            continue
        policy = audited(wheel, command)
        if not policy.startswith("manylinux_2_28_"):
            sys.exit(f"wheels-check: {wheel.name} must be manylinux_2_28, auditwheel says {policy}")
        say(f"{wheel.name}: contents right; auditwheel says {policy}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="check_wheels", description=__doc__)
    parser.add_argument("dist", nargs="?", type=Path, help="default: dist, or dist/cuda")
    parser.add_argument("--bare", nargs="+", default=[], metavar="3.11")
    parser.add_argument("--debian", choices=ALL_RELEASES, help="as root")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--sdist", action="store_true")
    parser.add_argument("--may-skip", action="store_true")
    asked = parser.parse_args()
    if asked.cuda and not asked.bare:
        parser.error("--cuda needs --bare 3.11: this environment's torch may have no CUDA")
    asked.dist = asked.dist or ROOT / "dist" / ("cuda" if asked.cuda else "")
    if asked.sdist:
        try_sdist(check_sdist.newest(asked.dist), asked.bare)
        return 0
    wheels = sorted(asked.dist.glob("kvswap_torch-*-manylinux_2_28_*.whl"))
    if not wheels:
        sys.exit(f"wheels-check: {asked.dist} must have wheels, has none; run: make wheels")
    check_all(wheels, may_skip=asked.may_skip)
    if asked.debian:
        within(*check_debian.answer(asked.debian, readme_program() + AFTER, PROBE))
        return 0
    if asked.emulated:
        arm = next((wheel for wheel in wheels if "-cp311-" in wheel.name
                    and wheel.stem.endswith("_aarch64")), None)  # fmt: skip
        if arm is None:
            sys.exit(f"wheels-check: {asked.dist} has no wheel for Python 3.11 on aarch64")
        check_emulated.check(arm)
        return 0
    try_wheels(asked.dist, wheels, asked.bare)
    return 0


if __name__ == "__main__":
    sys.exit(main())
