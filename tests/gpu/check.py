"""Everything to check on a machine with a GPU, in under 8 minutes: ``make gpu-check``.

Builds for the torch that is installed, or takes libraries that ``make gpu-prebuilt`` made elsewhere
(``--prebuilt DIR``). Then it runs tests/gpu (a few with every launch waited for, all ops, the
engine; a process each, since a device's error ends all that its process does there), bench/gpu.py
(each op), bench/gpu_decode.py, a profile of decoding, compute-sanitizer over a part of the tests,
and the demo. ``--only`` runs some of these.

tests/gpu/results/<device>.json is written after each step. If the environment names a folder OUT,
that file and the steps' own are copied there each time. A step that finds no time left is omitted
and named; the benchmarks stop by themselves and name the rows they had no time for. What each test
said is in build/gpu/*.xml.

Needs torch with CUDA, transformers, nvcc, g++ and cmake, and no network. What else is missing has a
fallback or is left out, and the file says so: liburing (reads through threads), Highway (scalar CPU
kernels), a JSON header (no config files in C++), ninja (make builds), pytest (no tests),
compute-sanitizer, typer or rich (no demo). GoogleTest is not used.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path("build/gpu")  # below ROOT, where every step runs
RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = 465  # for all steps
OURS = ("kvswap-text", "kvswap", "kvswap-text-k400", "kvswap-k400", "kvswap-fp8", "kvswap-int4")
CONTENDERS = (*OURS, "inplace", "dynamic", "offloaded")
OUT_FILES_MAX, OUT_BYTES_MAX = 8, 16 << 20  # copied to $OUT at most
STEP_SECONDS_MIN = 10  # a step with less is not begun
ROW_SECONDS = 35  # a benchmark may be that far into a row when its time is over
PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-rfE", "-p", "no:cacheprovider"),
    *("-o", "faulthandler_timeout=40"),  # a kernel that never ends says where it was waited for
]
TEST_SECONDS = {"ops": 90, "engine": 110}
TEST_WORKERS = {"ops": 4, "engine": 1}
BENCHMARKS = {
    "bench": ("ops", "op benchmarks", "bench.gpu", 45, ["--sizes", "512"]),
    "decode": ("decode", "decode benchmarks", "bench.gpu_decode", 50, ["--steps", "16"]),
}
PARTS = ("smoke", "ops", "engine", "bench", "decode", "demo", "sanitize", "profile")
# One small case of each kind of kernel: with launches waited for, the first that fails is named.
SMOKE = {
    "ops": "test_paged_gather and 3-1 or test_attention_head_dims and 128 or test_project_keys or "
    "test_group_mass or test_select_groups",
    "engine": "equal_a_cache_in_memory and llama",
}
# compute-sanitizer slows a kernel by far: one small case of each op.
SANITIZED = (
    "test_paged_gather and 3-1 or test_attention_head_dims and 8-96 or test_opcheck or "
    "test_group_max and 1000 or test_top_k_groups and 16385 or test_merge_attention and shape3"
)
Step = dict[str, Any]


class Steps:
    """Runs commands one after the other and keeps what came of them, within one time for all."""

    def __init__(self, seconds: float, write: Callable[[], None] = lambda: None):
        self.ends_at = time.monotonic() + seconds
        self.done: list[Step] = []
        self.write = write  # after each step: a visit may end at any time

    def left(self) -> float:
        return self.ends_at - time.monotonic()

    def run(self, name: str, command: list[str], seconds: float, **environment: str) -> bool:
        """One step, which may take `seconds` and no more than is left; shown as it comes."""
        seconds = min(seconds, self.left())
        if seconds < STEP_SECONDS_MIN:
            self.leave_out(name, "no time was left")
            return False
        print(f"== {name}: {' '.join(command)}", flush=True)
        begin = time.monotonic()
        outcome = run_within(command, seconds, environment)
        self._keep(name, outcome, time.monotonic() - begin)
        return outcome == "ok"

    def leave_out(self, name: str, why: str) -> None:
        self._keep(name, f"left out: {why}", 0.0)

    def _keep(self, name: str, outcome: str, seconds: float) -> None:
        print(f"== {name}: {outcome}", flush=True)
        self.done.append({"step": name, "outcome": outcome, "seconds": round(seconds, 1)})
        self.write()


def run_within(command: list[str], seconds: float, environment: dict[str, str]) -> str:
    """What came of it. Out of time it is ended with all that it started."""
    try:
        # A session of its own: a build's compilers would go on without it.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
    except FileNotFoundError:
        return f"failed: no {command[0]} on PATH"
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            return f"ended: took more than {seconds:.1f} s, and is still in its driver"
        return f"ended: took more than {seconds:.1f} s"
    return "ok" if code == 0 else f"failed ({code})"


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def build(steps: Steps, architecture: str, dependencies: Path | None) -> bool:
    """The libraries in the source tree, for this device alone."""
    configure = [
        *("cmake", "-S", ".", "-B", str(BUILD), "-DKVSWAP_INPLACE=ON", "-DKVSWAP_BUILD_TESTS=OFF"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DKVSWAP_CUDA_ARCHITECTURES={architecture}",
        "-DKVSWAP_WERROR=OFF",  # of a compiler that may be newer than ours
        *(["-GNinja"] if shutil.which("ninja") else []),
    ]
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    prefix = {} if dependencies is None else {"CMAKE_PREFIX_PATH": str(dependencies.resolve())}
    if not steps.run("configure", configure, 60, CUDACXX=nvcc, **prefix):
        return False
    jobs = str(os.cpu_count() or 1)
    compile_all = ["cmake", "--build", str(BUILD), "--target", "libraries", "-j", jobs]
    return steps.run("build", compile_all, 300)


def take_prebuilt(steps: Steps, folder: Path) -> bool:
    """Puts the libraries of `folder` into the source tree, if this machine can load them."""
    for name in ("lib/libkvswap_torch.so", "lib/build_info.json"):
        (ROOT / "kvswap_torch" / name).parent.mkdir(exist_ok=True)
        shutil.copy2(folder / name, ROOT / "kvswap_torch" / name)
    for module in folder.glob("_C.*.so"):
        shutil.copy2(module, ROOT / "kvswap_torch" / module.name)
    # A module made elsewhere knows where torch's libraries are there, not here.
    torch_lib = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{torch_lib}:{before}" if before else str(torch_lib)
    one_op = "from kvswap_torch import _C, ops; import torch; x = torch.randn(2, 64, device='cuda')"
    one_op += "; assert torch.equal(ops.group_max(x, 4).cpu(), ops.group_max(x.cpu(), 4))"
    return steps.run("prebuilt libraries", [sys.executable, "-c", one_op], 60)


def tests(part: str) -> list[str]:
    # Settings of the other tests need packages that may be missing.
    return [*PYTEST, "--confcutdir", "tests/gpu", f"tests/gpu/test_{part}.py"]


def run_tests(steps: Steps, part: str) -> None:
    if not is_installed("pytest"):
        steps.leave_out(part, "pytest is not installed")
        return
    command = [*tests(part), "--junitxml", str(BUILD / f"{part}.xml")]
    if TEST_WORKERS[part] > 1 and is_installed("xdist"):
        command += ["-n", str(TEST_WORKERS[part])]
    steps.run(part, command, TEST_SECONDS[part])


def smoke(steps: Steps) -> None:
    for part, names in SMOKE.items():
        if is_installed("pytest"):
            command = [*tests(part), "-x", "-k", names]
            steps.run(f"{part}, each launch waited for", command, 60, CUDA_LAUNCH_BLOCKING="1")


def profile(steps: Steps) -> None:
    command = [sys.executable, "-m", "tests.gpu.profile_step", "--out", str(BUILD / "profile.txt")]
    steps.run("profile of three steps", command, 60)


def bench(steps: Steps, name: str, module: str, seconds: float, extra: list[str]) -> dict[str, Any]:
    """What the benchmark wrote, as far as it came."""
    path = BUILD / f"{module.rsplit('.', 1)[-1]}.json"
    (ROOT / path).unlink(missing_ok=True)
    seconds = min(seconds, max(0.0, steps.left() - ROW_SECONDS))
    command = [sys.executable, "-m", module, "--seconds", f"{seconds:.0f}", "--json", str(path)]
    command += extra
    steps.run(name, command, seconds + ROW_SECONDS)
    return read(ROOT / path)


def read(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none, or half of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def sanitize(steps: Steps) -> None:
    if shutil.which("compute-sanitizer") is None:
        steps.leave_out("compute-sanitizer", "not installed")
    elif not is_installed("pytest"):
        steps.leave_out("compute-sanitizer", "pytest is not installed")
    else:
        # torch asks the driver for what may not be there, and goes on.
        sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
        sanitizer += ["--report-api-errors", "no"]
        # torch's allocator hands out pieces of large blocks; one block each makes their ends real.
        steps.run(
            "compute-sanitizer",
            [*sanitizer, *tests("ops"), "-k", SANITIZED],
            100,
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )


def demo(steps: Steps) -> None:
    if not is_installed("typer", "rich"):
        steps.leave_out("demo", "typer or rich is not installed")
        return
    arguments = ["--device", "cuda", "--tokens", "8000", "--out", str(BUILD / "demo.json")]
    steps.run("demo", [sys.executable, "-m", "examples.demo", *arguments], 90)


def bring_back(results: Path) -> None:
    """Copies what a visit is for into $OUT, the results first; small files before large ones."""
    if not (out := os.environ.get("OUT")):
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    made = sorted(
        (path for kind in ("*.xml", "*.json", "*.txt") for path in (ROOT / BUILD).glob(kind)),
        key=lambda path: path.stat().st_size,
    )
    fitting = [path for path in (results, *made) if path.stat().st_size <= OUT_BYTES_MAX]
    for path in fitting[:OUT_FILES_MAX]:
        shutil.copy2(path, Path(out) / path.name)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"parts, with commas between: {', '.join(PARTS)}"
    )
    parser.add_argument("--prebuilt", type=Path, help="folder of `make gpu-prebuilt`: no build")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together")
    parser.add_argument(
        "--path", type=Path, nargs="+", default=[Path(".")], help="folders of decode's caches"
    )
    parser.add_argument("--contenders", help="of decode's caches, with commas between; all of them")
    args = parser.parse_args(arguments)
    args.only = args.only.split(",")
    if unknown := sorted(set(args.only) - set(PARTS)):
        parser.error(f"--only: must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if args.prebuilt and not (args.prebuilt / "lib" / "libkvswap_torch.so").is_file():
        parser.error(f"--prebuilt: must hold lib/libkvswap_torch.so, got {args.prebuilt}")
    return args


class Visit:
    """What one run finds on a device, written as it comes."""

    def __init__(self, args: argparse.Namespace, properties: Any):
        import torch

        self.args = args
        name = re.sub(r"[^a-z0-9]+", "_", properties.name.lower()).strip("_")
        self.path = RESULTS / f"{name}.json"
        self.architecture = f"{properties.major}{properties.minor}"
        self.result: dict[str, Any] = {
            "device": properties.name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "date": datetime.date.today().isoformat(),
            "command": "make gpu-check",
            "ops": {},
            "decode": {},
        }
        self.steps = Steps(args.seconds, self.write)

    def write(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        self.result.update(libraries=built_with(), steps=self.steps.done)
        self.path.write_text(json.dumps(self.result, indent=2) + "\n")
        bring_back(self.path)

    def build(self) -> bool:
        prebuilt = self.args.prebuilt
        if prebuilt is not None and take_prebuilt(self.steps, prebuilt):
            return True
        return build(self.steps, self.architecture, prebuilt and prebuilt / "dep")

    def benchmark(self, part: str) -> None:
        key, name, module, seconds, extra = BENCHMARKS[part]
        if part == "bench":
            self.result[key] = bench(self.steps, name, module, seconds, extra)
        for folder in self.args.path if part == "decode" else ():
            names = self.args.contenders.split(",") if self.args.contenders else CONTENDERS
            if folder != self.args.path[0]:  # memory is the same beside any disk
                names = [name for name in names if name in OURS]
            there = [*extra, "--path", str(folder), "--only", *names]
            found = bench(self.steps, f"{name} on {folder}", module, seconds, there)
            self.result[key][str(folder)] = found
        self.write()  # its step was written before

    def run(self, part: str) -> None:
        if part in BENCHMARKS:
            self.benchmark(part)
        elif part in TEST_SECONDS:
            run_tests(self.steps, part)
        else:
            {"smoke": smoke, "profile": profile, "sanitize": sanitize, "demo": demo}[part](
                self.steps
            )


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if not is_installed("torch"):
        print("gpu-check: torch must be installed and is not found")
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device; nothing to check here")
        return 1
    (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
    visit = Visit(args, torch.cuda.get_device_properties(0))
    for part in PARTS if visit.build() else ():
        if part in args.only:
            visit.run(part)
    print(f"gpu-check: {visit.path.relative_to(ROOT)}")
    done = visit.steps.done
    return 0 if all(step["outcome"].startswith(("ok", "left out")) for step in done) else 1


def built_with() -> dict[str, Any]:
    """Which dependencies the libraries found: 0 is a fallback."""
    return read(ROOT / "kvswap_torch" / "lib" / "build_info.json")


if __name__ == "__main__":
    sys.exit(main())
