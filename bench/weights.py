"""ms of a linear layer in each format of weights: ours, torch's and torchao's.

    python -m bench weights --rows 1,8,64 --out weights

Layers of `1b`'s shapes; every round measures all formats by turns, so that pairs are of the same
moment. Also how far each format's result is from that of the weights in fp32.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from bench import machine
from kvswap_torch.few_bits import FewBitLinear
from kvswap_torch.half_linear import HalfLinear

SHAPES = {"gate": (8192, 2048), "down": (2048, 8192), "attention": (2048, 2048)}  # outputs, inputs
FIRST = "half_linear"  # what others are compared with
Layer = Callable[[torch.Tensor], torch.Tensor]


def layers(outputs: int, inputs: int) -> tuple[torch.Tensor, dict[str, Layer]]:
    """Weights, and a layer of them in each format."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=False).bfloat16().requires_grad_(False)
    weight = plain.weight.data.normal_(0, 0.02)
    found: dict[str, Layer] = {"torch bf16": plain, FIRST: HalfLinear.of(plain)}
    for bits in (8, 4):
        found[f"int{bits}"] = FewBitLinear.of(plain, weight, bits)
    if importlib.util.find_spec("torchao") is not None:
        found["torchao int8"] = _of_torchao(weight)
    return weight, found


def _of_torchao(weight: torch.Tensor) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False).bfloat16())
    model[0].weight.data = weight.clone()
    quantize_(model, Int8WeightOnlyConfig())
    return model


@torch.inference_mode()
def measured(outputs: int, inputs: int, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of each format the median and the least ms, over the first's of pairs, and the error."""
    weight, found = layers(outputs, inputs)
    given = torch.randn(rows, inputs).bfloat16()
    exact = given.float() @ weight.float().T
    times: dict[str, list[float]] = {name: [] for name in found}
    errors = {}
    for name, layer in found.items():
        errors[name] = ((layer(given).float() - exact).norm() / exact.norm()).item()
    for _ in range(rounds):
        for name, layer in found.items():
            began = time.perf_counter()
            layer(given)
            times[name].append(time.perf_counter() - began)
    return {
        name: {
            "ms": round(statistics.median(taken) * 1e3, 3),
            "ms_least": round(min(taken) * 1e3, 3),  # says more where others use the machine
            "ratio_of_pairs": round(
                statistics.median(a / b for a, b in zip(taken, times[FIRST], strict=True)), 3
            ),
            "error": round(errors[name], 4),
        }
        for name, taken in times.items()
    }


def main(
    rows: Annotated[str, typer.Option(help="rows of what is multiplied")] = "1,8,64",
    rounds: Annotated[int, typer.Option(min=1, help="of each format")] = 30,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    told: dict[str, Any] = {
        name: {str(count): measured(*shape, count, rounds) for count in map(int, rows.split(","))}
        for name, shape in SHAPES.items()
    }
    results = {"machine": machine.describe("."), "rounds": rounds, "layers": told}
    Console().print(results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
