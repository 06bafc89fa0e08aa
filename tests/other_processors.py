"""Runs tests with the sums of other processors, as far as this one has their instructions.

    python -m tests.other_processors [--threads 4] [pytest's arguments]

Kernels of ours, torch's and oneDNN's add in another order on each processor; what compares two
implementations must hold on all of them. Without arguments: the few tests that are most sensitive.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SENSITIVE = (
    "tests/python/test_hf_selection.py::"
    "test_scores_and_kinds_of_projections_choose_as_the_reference",
    "tests/python/test_hf_selection.py::test_native_chooses_as_the_reference[llama-ahead]",
    "tests/python/test_tuning_recall.py::test_steps_choose_what_a_session_chooses",
)
# By our kernels' level: what torch and oneDNN have at most.
OTHERS = {
    "SCALAR": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "SSE4": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}


def lanes(levels: list[str]) -> list[dict[str, str]]:
    """Environments to run in, of a processor with these levels of ours, the usual one last."""
    below = [{"KVSWAP_SIMD": level} | OTHERS.get(level, {}) for level in levels[:-1]]
    return below or [{"ATEN_CPU_CAPABILITY": "default"}]


def main() -> int:
    from kvswap_torch import _C

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    options, words = parser.parse_known_args()
    failed = False
    for lane in lanes(list(_C.simd_levels())):
        print("other sums:", *(f"{name}={value}" for name, value in lane.items()), flush=True)
        lane |= {"OMP_NUM_THREADS": str(options.threads)}
        command = [sys.executable, "-m", "pytest", "-q", *(words or SENSITIVE)]
        failed |= (
            subprocess.run(command, cwd=ROOT, env=os.environ | lane, check=False).returncode != 0
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
