"""ms of a linear layer in each format of weights: ours, torch's and those of other libraries.

    python -m bench weights --rounds 10 --out weights
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m bench weights --rounds 10 \\
        --out weights_avx2

The second with the kernels of a processor that has AVX2 alone. Layers of `1b`'s shapes; every round
measures all formats by turns, so that pairs are of the same moment. Also how far each format's
result is from that of the weights in fp32. torchao, bitsandbytes and quanto (optimum-quanto) are
measured where they are installed.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from bench import machine
from kvswap_torch import _C
from kvswap_torch.few_bits import FewBitLinear
from kvswap_torch.half_linear import HalfLinear

SHAPES = {"gate": (8192, 2048), "down": (2048, 8192), "attention": (2048, 2048)}  # outputs, inputs
FIRST = "half_linear"  # what others are compared with
LEVELS = {"AVX2": "AVX2"}  # of torch's -> of ours, where torch was told to use less than there is
Layer = Callable[[torch.Tensor], torch.Tensor]


def layers(outputs: int, inputs: int) -> tuple[torch.Tensor, dict[str, Layer]]:
    """Weights, and a layer of them in each format."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=False).bfloat16().requires_grad_(False)
    weight = plain.weight.data.normal_(0, 0.02)
    found: dict[str, Layer] = {"torch bf16": plain, FIRST: HalfLinear.of(plain)}
    for bits in (8, 4):
        found[f"int{bits}"] = FewBitLinear.of(plain, weight, bits)
    for name, (package, make) in OTHERS.items():
        if version_of(package) is not None:
            found[name] = make(weight)
    return weight, found


def version_of(package: str) -> str | None:
    """Of an installed package; None: it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _plain(weight: torch.Tensor) -> nn.Sequential:
    """A layer of its own that a library may replace."""
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False).bfloat16())
    model[0].weight.data = weight.clone()
    return model


def _torchao(weight: torch.Tensor) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _plain(weight)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _bitsandbytes(weight: torch.Tensor, bits: int) -> nn.Module:
    import bitsandbytes

    outputs, inputs = weight.shape
    named = {"bias": False, "device": "cpu"}
    if bits == 8:
        layer = bitsandbytes.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False, **named)
        kept = {"has_fp16_weights": False}
        layer.weight = bitsandbytes.nn.Int8Params(weight.clone(), requires_grad=False, **kept)
    else:
        named |= {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
        layer = bitsandbytes.nn.Linear4bit(inputs, outputs, **named)
        kept = {"quant_type": "nf4"}
        layer.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, **kept)
    return layer.to("cpu")


def _quanto(weight: torch.Tensor, bits: int) -> nn.Module:
    from optimum import quanto

    model = _plain(weight)
    quanto.quantize(model, weights=quanto.qint8 if bits == 8 else quanto.qint4)
    quanto.freeze(model)
    return model


# Name -> the package it needs, and what makes a layer of these weights.
OTHERS: dict[str, tuple[str, Callable[[torch.Tensor], nn.Module]]] = {
    "torchao int8": ("torchao", _torchao),
    "bitsandbytes int8": ("bitsandbytes", functools.partial(_bitsandbytes, bits=8)),
    "bitsandbytes nf4": ("bitsandbytes", functools.partial(_bitsandbytes, bits=4)),
    "quanto int8": ("optimum-quanto", functools.partial(_quanto, bits=8)),
    "quanto int4": ("optimum-quanto", functools.partial(_quanto, bits=4)),
}


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
    threads: Annotated[int, typer.Option(min=0, help="0: as many as cores")] = 0,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    level = LEVELS.get(torch.backends.cpu.get_cpu_capability())
    if level is not None:
        _C.use_simd_level(level)  # ours are those of the processor that torch sees
    told: dict[str, Any] = {
        name: {str(count): measured(*shape, count, rounds) for count in map(int, rows.split(","))}
        for name, shape in SHAPES.items()
    }
    packages = {package: version_of(package) for package, _ in OTHERS.values()}
    versions = {package: found for package, found in packages.items() if found is not None}
    results = {"machine": machine.describe("."), "rounds": rounds, "libraries": versions}
    results |= {"threads": torch.get_num_threads(), "layers": told}
    Console().print(results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
