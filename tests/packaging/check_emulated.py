"""Runs tests with a wheel for 64-bit Arm, by qemu-user: ``make wheels-check ARGS=--emulated``.

What ``make wheels ARGS="--architecture aarch64 --python 3.11"`` made is unpacked beside that
processor's torch and transformers, and Debian's Python for it runs tests of ops and of
``generate()``. Some 2.5 GB are fetched once, into build/emulated: the index's torch for Arm has
CUDA, whose libraries it loads. qemu-user has no io_uring, so reads go through threads; nothing here
says how fast that processor would be.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tests.packaging.run_docs import ROOT

PYTHON = "usr/bin/python3.11"
PLACE = ROOT / "build" / "emulated"
# Ops against their references, and a model's tokens against DynamicCache's.
FILES = ("test_ops_records.py", "test_ops_attention.py", "test_generate_equal.py")
CHOSEN = (
    "(round_trip and 0-4-64) or (head_dims and 1-64)"
    " or (llama and native and (greedy or reset_and or (turns and short)))"
)
PROBE = """
import json, platform
from kvswap_torch.native import build_info, require_library
import torch
torch.ops.load_library(require_library())
from kvswap_torch import _C
print(json.dumps({"machine": platform.machine(), **build_info()}))
"""


def packages(machine: str) -> Path:
    """The folder with torch, transformers and pytest for the processor, fetched once."""
    done = PLACE / f"packages-{machine}"
    if done.is_dir():
        return done
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = re.findall(r"^((?:torch|transformers|pytest|hypothesis)==[\d.]+)$", pins, re.MULTILINE)
    # Three signs of equality: a local release for this processor's CPU is not meant.
    wanted = [name.replace("torch==", "torch===") for name in wanted]
    print("wheels-check: fetching torch for Arm and what it loads (2.5 GB, once)", flush=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as name:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        command += ["--target", f"{name}/packages", "--only-binary=:all:", "--no-compile"]
        command += ["--implementation", "cp", "--python-version", "3.11"]
        for old in range(17, 29):
            command += ["--platform", f"manylinux_2_{old}_{machine}"]
        command += ["--platform", f"manylinux2014_{machine}"]
        told = subprocess.run([*command, *wanted], capture_output=True, text=True)
        if told.returncode:
            errors = [line for line in told.stderr.splitlines() if line.startswith("ERROR")]
            sys.exit(f"wheels-check: --emulated: {errors[-1] if errors else told.stderr}")
        (Path(name) / "packages").rename(done)
    return done


def check(wheel: Path) -> None:
    """Ends the program with what the tests said, if one of them fails."""
    machine = wheel.stem.rsplit("_2_28_", 1)[1]
    emulator = shutil.which(f"qemu-{machine}")
    if emulator is None:
        sys.exit(f"wheels-check: --emulated needs qemu-{machine}; as root run: .ci/{machine}")
    PLACE.mkdir(parents=True, exist_ok=True)
    root = PLACE / f"root-{machine}"
    if subprocess.run([ROOT / ".ci" / f"{machine}-python", root]).returncode:
        sys.exit(1)
    beside = packages(machine)
    with tempfile.TemporaryDirectory(prefix="kvswap-emulated-") as name:
        # The wheel's package alone: this tree's has libraries for this processor.
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(Path(name) / "site")
        shutil.copytree(ROOT / "tests", Path(name) / "tests")
        shutil.copyfile(ROOT / "pyproject.toml", Path(name) / "pyproject.toml")
        environment = {
            "PATH": os.environ["PATH"], "HOME": name, "PYTHONPATH": f"{name}/site:{beside}",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        # A Raspberry Pi 4: the emulator's default has SVE, in which torch's libraries crash.
        python = [emulator, "-cpu", "cortex-a72", "-L", str(root), str(root / PYTHON)]
        begin = time.monotonic()
        told = subprocess.run([*python, "-c", PROBE], cwd=name, env=environment,
                              capture_output=True, text=True)  # fmt: skip
        if told.returncode:
            sys.exit(f"wheels-check: {wheel.name} does not import\n{told.stdout}{told.stderr}")
        print(f"wheels-check: {wheel.name} imports: {told.stdout.strip()}", flush=True)
        command = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN]
        command += [f"tests/python/{file}" for file in FILES]
        ran = subprocess.run(command, cwd=name, env=environment, text=True, capture_output=True)
        if ran.returncode:
            sys.exit(f"wheels-check: {wheel.name}\n{ran.stdout[-8000:]}{ran.stderr[-2000:]}")
    seconds = time.monotonic() - begin
    print(f"wheels-check: {wheel.name}: {ran.stdout.strip().splitlines()[-1]}; "
          f"{seconds:.0f} s by qemu-user")  # fmt: skip
