"""Everything to check on a machine with a GPU, in under 8 minutes: ``make gpu-check``.

Builds for the torch that is installed, runs tests/gpu, compute-sanitizer over a part of it, and
tests/bench/gpu.py, then writes tests/gpu/results/<device>.json. Needs torch with CUDA, nvcc, g++,
cmake and pytest, and no network. What else is missing is left out and named: liburing, Highway,
xxHash (CMake has a fallback for each), ninja (make builds), compute-sanitizer and
tests/bench/gpu_decode.py.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
RESULTS = Path(__file__).resolve().parent / "results"
PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    # The other tests' settings need packages that may be missing.
    *("--confcutdir", "tests/gpu", "tests/gpu"),
]
# compute-sanitizer slows a kernel by far: one small case of each op.
SANITIZED = (
    "test_paged_gather and 3-1 or test_attention_head_dims and 8-96 or test_opcheck or "
    "test_group_max and 1000 or test_top_k_groups and 16385 or test_merge_attention and shape3"
)


def run(name: str, command: list[str], seconds: int, **environment: str) -> dict[str, object]:
    """Runs one step; what it said is shown as it comes."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, timeout=seconds, check=False
        )
        outcome = "ok" if done.returncode == 0 else f"failed ({done.returncode})"
    except subprocess.TimeoutExpired:
        outcome = f"took more than {seconds} s"
    except FileNotFoundError:
        outcome = f"left out: no {command[0]} on PATH"
    print(f"== {name}: {outcome}", flush=True)
    return {"step": name, "outcome": outcome, "seconds": round(time.monotonic() - begin, 1)}


def left_out(name: str, why: str) -> dict[str, object]:
    print(f"== {name}: left out: {why}", flush=True)
    return {"step": name, "outcome": f"left out: {why}", "seconds": 0.0}


def build(architecture: str) -> list[dict[str, object]]:
    """The libraries in the source tree, for this device alone."""
    configure = [
        *("cmake", "-S", ".", "-B", str(BUILD), "-DKVSWAP_INPLACE=ON", "-DKVSWAP_BUILD_TESTS=OFF"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DKVSWAP_CUDA_ARCHITECTURES={architecture}",
        *(["-GNinja"] if shutil.which("ninja") else []),
    ]
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    steps = [run("configure", configure, 120, CUDACXX=nvcc)]
    if steps[0]["outcome"] == "ok":
        jobs = str(os.cpu_count() or 1)
        compile_all = ["cmake", "--build", str(BUILD), "--target", "libraries", "-j", jobs]
        steps.append(run("build", compile_all, 300))
    return steps


def sanitize() -> dict[str, object]:
    if shutil.which("compute-sanitizer") is None:
        return left_out("compute-sanitizer", "not installed")
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    # torch's allocator hands out pieces of large blocks; one block each makes their ends real.
    return run(
        "compute-sanitizer",
        [*sanitizer, *PYTEST, "-k", SANITIZED],
        120,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )


def bench() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "tests.bench.gpu", "--json", str(path)]
        steps = [run("op benchmarks", command, 150)]
        rows = json.loads(path.read_text()) if path.is_file() else []
    decode = "decode benchmarks"
    if (ROOT / "tests" / "bench" / "gpu_decode.py").is_file():
        steps.append(run(decode, [sys.executable, "-m", "tests.bench.gpu_decode"], 150))
    else:
        steps.append(left_out(decode, "no tests/bench/gpu_decode.py yet"))
    return steps, rows


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        print("gpu-check: torch must be installed and is not found")
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device; nothing to check here")
        return 1
    properties = torch.cuda.get_device_properties(0)
    steps = build(f"{properties.major}{properties.minor}")
    rows: list[dict[str, object]] = []
    if all(step["outcome"] == "ok" for step in steps):
        if importlib.util.find_spec("pytest") is None:
            steps.append(left_out("tests", "pytest is not installed"))
        else:
            steps += [run("tests", PYTEST, 180), sanitize()]
        measured, rows = bench()
        steps += measured
    result = {
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "command": "make gpu-check",
        "steps": steps,
        "ops": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "_", properties.name.lower()).strip("_")
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"gpu-check: {path.relative_to(ROOT)}")
    fine = [step["outcome"] == "ok" or str(step["outcome"]).startswith("left out")
            for step in steps]  # fmt: skip
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
