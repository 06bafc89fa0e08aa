"""Writes the tables of README.md and docs from results, or from shapes, and their plots.

    python -m bench table

Replaces what stands between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` on these pages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench import headline
from bench.machine import RESULTS
from bench.pages import answers, fit, gpu, home, plots, presets, reuse, speed, weights
from bench.side_by_side.report import OF_LATENT, OF_LLAMA
from bench.side_by_side.report import load as load_cells

FOLDER = Path("docs/benchmarks")
FIT = Path("docs/how-to/will-it-fit.md")
HOME = Path("docs/index.md")
GPU = Path("docs/gpu.md")
README = Path("README.md")
PAGES = (README, HOME, FOLDER / "index.md", FOLDER / "methodology.md", FIT, GPU)
# Runs that fill table 2.
OF_LENGTHS = ("reference_model_defaults", "reference_model_34_16k", "reference_model_34_32k")
OF_PRESETS = ("13", "fp8", "heads", "end", "smaller")  # runs that fill table 4


def load(*names: str) -> list[dict[str, Any]]:
    return [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names]


def real_results() -> list[dict[str, Any]]:
    names = ("2k_defaults", "defaults", "8k_defaults", "tuned", "8k_tuned")
    return load(*(f"quality/smollm2_{name}" for name in names))


def preset_results() -> list[dict[str, Any]]:
    return load(*(f"quality/presets_reference_model_{name}" for name in OF_PRESETS))


TABLES = {
    "headline": headline.rows,
    "home": lambda: home.home_rows(
        *load("quality/reference_model_defaults", "side_by_side/1b_32k_b1_local")
    ),
    "speed": speed.speed_rows,
    "peers": lambda: speed.peer_rows(load_cells(OF_LLAMA)),
    "latent": lambda: speed.latent_rows(load_cells(OF_LATENT)),
    "lengths": lambda: answers.length_rows(load(*(f"quality/{name}" for name in OF_LENGTHS))),
    "real": lambda: answers.real_rows(real_results(), load("real_speed", "real_speed_8k")),
    "presets": lambda: presets.preset_rows(
        preset_results(), "16384", *load("side_by_side_presets/1b_32k_b1_local")
    ),
    "prefill": lambda: reuse.prefill_rows(
        load("prefill_reference_16k_bf16", "prefill_reference_16k_avx2_fp32", "prefill_1b_8k")
    ),
    "turns": lambda: reuse.turns_rows(load("turns_1b_4k", "turns_1b_8k")),
    "tuner": lambda: reuse.tuner_rows(load("tuner_emmc", "tuner_local")),
    "weights": lambda: weights.weight_rows(load("weights", "weights_avx2")),
    "reader": lambda: reuse.reader_rows(load("reader")),
    "fit-32k": lambda: fit.rows(fit.CONTEXTS[0]),
    "fit-128k": lambda: fit.rows(fit.CONTEXTS[1]),
    "gpu-facts": lambda: gpu.fact_rows(gpu.latest()),
    "gpu-steps": lambda: gpu.step_rows(gpu.latest()),
    "gpu-ops": lambda: gpu.op_rows(gpu.latest()),
    "gpu-decode": lambda: gpu.decode_rows(gpu.latest()),
}


def with_tables(text: str, tables: dict[str, str]) -> str:
    """The page with what stands between its marks replaced."""
    for name, table in tables.items():
        marks = rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)"
        text = re.sub(marks, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
    return text


def main() -> None:
    tables = {name: "\n".join(table()) for name, table in TABLES.items()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = with_tables(text, tables)
        if page == README:
            text = gpu.readme(text, gpu.latest())
        page.write_text(text, encoding="utf-8")
    of_presets = presets.joined(preset_results(), "16384")
    plots.draw_all(FOLDER, load_cells(), real_results(), of_presets)


if __name__ == "__main__":
    main()
