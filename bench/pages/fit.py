"""The tables of docs/how-to/will-it-fit.md: what models of five sizes take, by their shapes."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from kvswap_torch.hf.fit import Asked, Fit, Place, estimate
from kvswap_torch.memory_size import format_bytes

GIB = 1 << 30
FIXED = 350 << 20  # interpreter, torch and transformers, as `kvswap fit` measures them
CONTEXTS = (32768, 131072)
FORMATS = ("bf16", "int8", "int4")
MEMORIES = (8 * GIB, 16 * GIB)


def _llama(
    layers: int, hidden: int, heads: int, head_dim: int, wide: int, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=head_dim,
        max_position_embeddings=131072, tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen(layers: int, heads: int, wide: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=131072, tie_word_embeddings=False,
    )  # fmt: skip


SHAPES: dict[str, PretrainedConfig] = {
    "1B": _llama(16, 2048, 32, 64, 8192, tied=True),
    "3B": _llama(28, 3072, 24, 128, 8192, tied=True),
    "8B": _llama(32, 4096, 32, 128, 14336, tied=False),
    "14B": _qwen(40, 40, 17408),
    "32B": _qwen(64, 64, 25600),
}


def rows(context: int) -> list[str]:
    """One sequence of `context` tokens; the cache divides no budget, but takes what it chooses."""
    fitting = " | ".join(f"fits {memory // GIB} GiB" for memory in MEMORIES)
    lines = [
        f"| model | weights | weights, GiB | activations, GiB | KV cache, GiB | all of KV, GiB "
        f"| in all, GiB | on disk, GiB | KiB a token | {fitting} |",
        "|---|---|---|---|---|---|---|---|---|" + "---|" * len(MEMORIES),
    ]
    for name, config in SHAPES.items():
        for weights in FORMATS:
            asked = Asked(config, torch.bfloat16, context, weights=weights, path="/")
            lines.append(_row(name, weights, estimate(asked, FIXED)))
    return lines


def _row(name: str, weights: str, fit: Fit) -> str:
    cache = fit.cache
    sizes = (
        fit.weights,
        fit.activations.bytes,
        cache.memory_bytes,
        cache.full_bytes,
        fit.memory_bytes,
    )
    cells = [name, weights, *(f"{size / GIB:.2f}" for size in (*sizes, cache.disk_bytes))]
    cells.append(f"{fit.disk_bytes_per_token / 1024:.0f}")
    for memory in MEMORIES:
        short = fit.memory_bytes - memory
        fits = fit.fits(Place(memory, cache.disk_bytes, FIXED))
        cells.append("yes" if fits else f"no, {format_bytes(short)} short")
    return "| " + " | ".join(cells) + " |"
