"""What e4m3 costs a model by what shares a scale: nats to the unrounded cache.

    python -m bench.float8_scales --model build/models/smollm2 --out scales_smollm2

A text's keys and values (in memory, nothing is selected) are rounded by each rule, and the text
goes on, teacher-forced, over each cache. The records of `records="fp8"` have one power of two for
each group of tokens, KV head and side (keys, values); the others are what it might have been: wider
ones need fewer exponents, and a scale of its own for each token rounds best and costs four bytes.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

from bench import machine
from bench.quality.text import Texts
from bench.reading import REFERENCE
from kvswap_torch.cli.load import load_model, load_tokenizer

LARGEST = 448.0  # of e4m3
CHARACTERS_PER_TOKEN = 6

Scales = Callable[[torch.Tensor], torch.Tensor]  # largest sizes -> scales


def powers_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The smallest 2^e with ``largest <= 448 * 2^e``."""
    return torch.exp2(torch.ceil(torch.log2((largest / LARGEST).clamp_min(2.0**-120))))


def exact_scales(largest: torch.Tensor) -> torch.Tensor:
    return (largest / LARGEST).clamp_min(2.0**-120)


def rounded(side: torch.Tensor, dims: tuple[int, ...], group: int, scales: Scales) -> torch.Tensor:
    """Keys or values ``[batch, kv_heads, tokens, head_dim]`` as e4m3 holds them.

    `dims`: of ``[batch, kv_heads, groups, group, head_dim]``, those that share a scale.
    """
    of_groups = side.float().unflatten(2, (-1, group))
    scale = scales(of_groups.abs().amax(dims, keepdim=True))
    held = (of_groups / scale).to(torch.float8_e4m3fn).float() * scale
    return held.flatten(2, 3).to(side.dtype)


# What shares a scale: the dimensions, tokens of a group, the scale. The first is the product's.
RULES: dict[str, tuple[tuple[int, ...], int, Scales]] = {
    "4 tokens of a KV head, a power of two": ((3, 4), 4, powers_of_two),
    "16 tokens of a KV head, a power of two": ((3, 4), 16, powers_of_two),
    "a KV head, a power of two": ((2, 3, 4), 1, powers_of_two),
    "a layer, a power of two": ((1, 2, 3, 4), 1, powers_of_two),
    "a token of a KV head, a power of two": ((4,), 1, powers_of_two),
    "a token of a KV head, exact": ((4,), 1, exact_scales),
}


def logits_after(model: Any, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities ``[tokens, vocabulary]`` of what follows each of `ids`."""
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[0].float().log_softmax(-1)


def measure(model: Any, ids: torch.Tensor, follow: int) -> dict[str, dict[str, float]]:
    """By rule: KL in nats, how often the most likely token is the same, loss beside the full's."""
    cache, rest = DynamicCache(), ids[:, -follow:]
    with torch.no_grad():
        model(ids[:, :-follow], past_key_values=cache, logits_to_keep=1)
    full = logits_after(model, copy.deepcopy(cache), rest)
    found = {}
    for name, rule in RULES.items():
        other = copy.deepcopy(cache)
        for layer in other.layers:
            layer.keys, layer.values = (rounded(side, *rule) for side in (layer.keys, layer.values))
        told = logits_after(model, other, rest)
        losses = [-each[:-1].gather(1, rest[0, 1:, None]).mean().item() for each in (told, full)]
        found[name] = {
            "kl": (full.exp() * (full - told)).sum(1).mean().item(),
            "same": (full.argmax(1) == told.argmax(1)).float().mean().item(),
            "loss": losses[0] - losses[1],
        }
    return found


def lines(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """One a rule: means over documents."""
    told = results["rules"]
    return [
        (name, f"{told[name]['kl']:.4f}", f"{told[name]['same']:.3f}", f"{told[name]['loss']:+.4f}")
        for name in RULES
    ]


COLUMNS = ("what shares a scale", "KL, nats", "most likely token the same", "loss")


def main(
    model_folder: Annotated[Path, typer.Option("--model", help="folder of a model")] = REFERENCE,
    tokens: Annotated[int, typer.Option(help="rounded, of each document; a multiple of 16")] = 4096,
    follow: Annotated[int, typer.Option(help="tokens that go on from there")] = 256,
    documents: Annotated[int, typer.Option(help="texts, held out")] = 6,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console()
    described = machine.describe(".")
    tokenizer = load_tokenizer(str(model_folder))
    model = load_model(str(model_folder), "bfloat16")
    texts, found = Texts(), []
    for number in track(range(documents), "reading", console=console):
        rng = np.random.default_rng(number)
        text = texts.draw(rng, CHARACTERS_PER_TOKEN * (tokens + follow))
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : tokens + follow]
        found.append(measure(model, ids, follow))
    results = {
        "machine": described,
        "model": model_folder.name,
        "tokens": tokens,
        "follow": follow,
        "documents": documents,
        "rules": {
            rule: {
                name: statistics.fmean(each[rule][name] for each in found)
                for name in ("kl", "same", "loss")
            }
            for rule in RULES
        },
    }
    table = Table(*COLUMNS, title=f"{model_folder.name}, {tokens:,} tokens, {documents} documents")
    for line in lines(results):
        table.add_row(*line)
    console.print(table)
    if out:
        console.print(f"wrote {machine.write(out, results).name}")


if __name__ == "__main__":
    typer.run(main)
