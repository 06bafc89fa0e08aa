"""The model's own work in a step: torch's linear layers and ours (`kvswap_torch.half_linear`).

    python -m bench.linear --models 1b,small,build/models/smollm2,reference --out linear

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \\
        python -m bench.linear --level AVX2 --out linear_avx2    # as a processor without AVX-512

A token of each sequence, after 400 that a StaticCache holds, by both models in turn: they share
their weights. Printed are medians of the milliseconds, the median ratio of pairs, and how fast the
weights were read.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import StaticCache

from bench import machine
from bench.prefill import REFERENCE
from bench.shapes import SHAPES, make_model
from bench.side_by_side.plan import LAYERS
from kvswap_torch import _C
from kvswap_torch.half_linear import HalfLinear, replace_linear

PAST = 400
WARM_UP = 3


def open_model(name: str) -> nn.Module:
    """In bf16, with torch's own layers."""
    from transformers import AutoModelForCausalLM

    if name in SHAPES:
        shape = SHAPES[name]
        shape = replace(shape, layers=LAYERS.get(name, shape.layers))
        return make_model(shape, PAST).to(torch.bfloat16)
    folder = "examples/reference_model" if name == REFERENCE else name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def with_our_layers(model: nn.Module) -> nn.Module:
    """The same weights behind our linear layers."""
    shared = {id(weights): weights for weights in model.parameters()}
    ours = copy.deepcopy(model, shared)
    replace_linear(ours)
    return ours


class Steps:
    """One model's steps, and how long each took."""

    def __init__(self, model: nn.Module, batch: int, steps: int):
        self.model, self.seconds = model, []
        self._cache = StaticCache(config=model.config, max_cache_len=PAST + steps)
        self._ids = torch.ones(batch, 1, dtype=torch.long)
        past = self._ids.expand(batch, PAST)
        model(input_ids=past, past_key_values=self._cache, logits_to_keep=1)

    def take(self) -> None:
        place = torch.full_like(self._ids, PAST + len(self.seconds))
        began = time.perf_counter()
        self.model(input_ids=self._ids, past_key_values=self._cache, position_ids=place)
        self.seconds.append(time.perf_counter() - began)


@torch.inference_mode()
def measure(name: str, batches: list[int], steps: int, console: Console) -> list[dict[str, Any]]:
    model = open_model(name)
    ours = with_our_layers(model)
    layers = [layer for layer in ours.modules() if isinstance(layer, HalfLinear)]
    weights = sum(layer.weight.nbytes for layer in layers)
    rows = []
    for batch in batches:
        count = WARM_UP + steps
        pair = Steps(model, batch, count), Steps(ours, batch, count)
        for _ in track(range(count), f"{name}, batch {batch}", console=console):
            for each in pair:
                each.take()
        torchs, with_ours = (each.seconds[WARM_UP:] for each in pair)
        ratio = statistics.median(a / b for a, b in zip(with_ours, torchs, strict=True))
        rows.append(
            {
                "model": Path(name).name,
                "batch": batch,
                "weight_bytes": weights,
                "torch_ms": round(1e3 * statistics.median(torchs), 2),
                "ours_ms": round(1e3 * statistics.median(with_ours), 2),
                "ratio_of_pairs": round(ratio, 3),
            }
        )
    return rows


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="ms a step")
    for heading in ("model", "batch", "torch", "ours", "ratio", "ours reads"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["batch"]),
            f"{row['torch_ms']:.1f}",
            f"{row['ours_ms']:.1f}",
            f"{row['ratio_of_pairs']:.2f}x",
            f"{row['weight_bytes'] / row['ours_ms'] / 1e6:.1f} GB/s",
        )
    console.print(table)


def main(
    models: Annotated[str, typer.Option(help="shapes, folders, or reference")] = (
        f"1b,small,{REFERENCE}"
    ),
    batches: Annotated[str, typer.Option(help="sequences")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(help="of each that count")] = 40,
    threads: Annotated[int, typer.Option(help="0: as many as cores")] = 0,
    level: Annotated[str, typer.Option(help="of our kernels: AVX2, ...; empty: the highest")] = "",
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console()
    if threads:
        torch.set_num_threads(threads)
    if level and not _C.use_simd_level(level):
        raise typer.BadParameter(f"--level: must be one of {_C.simd_levels()}, got {level!r}")
    rows = []
    for name in models.split(","):
        rows += measure(name, [int(batch) for batch in batches.split(",")], steps, console)
    show(console, rows)
    if out:
        facts = machine.describe(Path("."))
        machine.write(out, {"machine": facts, "threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
