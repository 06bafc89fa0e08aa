"""Functions and classes of ours that one decoding step runs, with nothing configured but a folder.

    python -m tools.step_functions            # counts; --list: names too
    python -m tools.step_functions --json build/step.json

A one-shot breakpoint stands on every symbol ``kvswap::`` of the built libraries, set by gdb between
two steps; what the compiler has inlined is not counted. Python's functions are those of the package
in the step before. All threads count. Needs gdb and nm, and leave to trace a process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "reference_model"
TOKENS = 2048  # read before: more than what a step attends
SYMBOL = re.compile(r"([0-9a-f]+) [tTwW] (kvswap::.*)")
OUT = "KVSWAP_STEP_FUNCTIONS"  # where gdb writes what it saw


def class_of(symbol: str) -> str:
    """The outermost class of a demangled name; empty: none, it is a free function.

    Classes begin with a capital; Highway's namespaces of a processor, ``N_AVX2``, do as well.
    """
    name = symbol.replace("(anonymous namespace)", "anonymous").replace("operator()", "operator")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    parts = name.partition("(")[0].split("::")[:-1]
    return next((part for part in parts if part[:1].isupper() and not part.startswith("N_")), "")


def in_gdb(gdb: Any) -> None:
    """Runs the child to its first signal, counts to the second, and writes the symbols."""
    for line in ("pagination off", "auto-solib-add off", "confirm off", "print thread-events off",
                 "breakpoint always-inserted on", "debuginfod enabled off"):  # fmt: skip
        gdb.execute(f"set {line}")
    for name in ("SIGUSR1", "SIGUSR2"):
        gdb.execute(f"handle {name} stop nopass")
    gdb.execute("run")
    names: dict[int, str] = {}
    for library, begin in _libraries(gdb.selected_inferior().pid).items():
        told = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True)
        for found in map(SYMBOL.match, told.stdout.splitlines()):
            if found and "[clone" not in found[2]:
                names.setdefault(begin + int(found[1], 16), found[2])
    seen: list[str] = []

    class Once(gdb.Breakpoint):
        def __init__(self, place: int):
            super().__init__(f"*{place:#x}", internal=True)
            self.place, self.silent = place, True

        def stop(self) -> bool:
            self.enabled = False
            seen.append(names[self.place])
            return False

    for place in names:
        Once(place)
    gdb.execute("continue")
    Path(os.environ[OUT]).write_text(json.dumps(sorted(seen)), encoding="utf-8")
    gdb.execute("kill")


def _libraries(pid: int) -> dict[str, int]:
    """Paths of ours in a process, and where each begins."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, *_, path = line.split()
        if "kvswap_torch" in path and ".so" in path:
            found.setdefault(path, int(place.partition("-")[0], 16))
    return found


def child() -> None:
    """Reads a text, decodes, prints Python's functions of a step, and a step between signals."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvswap_torch import KVSwapCache

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    ids = torch.randint(8, 200, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    seen: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and "/kvswap_torch/" in code.co_filename:
            seen.add(f"{code.co_filename.rpartition('/kvswap_torch/')[2]}: {code.co_qualname}")

    with (
        tempfile.TemporaryDirectory() as folder,
        torch.inference_mode(),
        KVSwapCache(model, folder, max_context=2 * TOKENS) as cache,
    ):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        for _ in range(3):
            model(input_ids=ids[:, :1], past_key_values=cache)
        sys.setprofile(profile)
        model(input_ids=ids[:, :1], past_key_values=cache)
        sys.setprofile(None)
        Path(f"{os.environ[OUT]}.python").write_text(json.dumps(sorted(seen)), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGUSR1)
        model(input_ids=ids[:, :1], past_key_values=cache)
        os.kill(os.getpid(), signal.SIGUSR2)


def measure() -> dict[str, list[str]]:
    """``functions`` and ``classes`` of C++, ``python``: ``file: function``."""
    if shutil.which("gdb") is None:
        raise SystemExit("step_functions: gdb must be installed, it is not in PATH")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        command = ["gdb", "--batch", "-x", __file__, "--args", sys.executable, "-m"]
        command += ["tools.step_functions", "--child"]
        environment = os.environ | {OUT: str(out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not out.is_file():
            raise SystemExit(f"step_functions: gdb saw no step:\n{done.stdout}{done.stderr}")
        functions = json.loads(out.read_text(encoding="utf-8"))
        python = json.loads(Path(f"{out}.python").read_text(encoding="utf-8"))
    classes = sorted({class_of(each) for each in functions} - {""})
    return {"functions": functions, "classes": classes, "python": python}


def main(arguments: list[str]) -> None:
    found = measure()
    files = {each.partition(":")[0] for each in found["python"]}
    print(f"C++: {len(found['functions'])} functions of {len(found['classes'])} classes; Python: "
          f"{len(found['python'])} functions of {len(files)} files")  # fmt: skip
    if "--list" in arguments:
        print(*(each for part in found.values() for each in part), sep="\n")
    if "--json" in arguments:
        path = Path(arguments[arguments.index("--json") + 1])
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        import gdb
    except ImportError:
        child() if "--child" in sys.argv else main(sys.argv[1:])
    else:
        in_gdb(gdb)
