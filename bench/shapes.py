"""Model shapes that the benchmarks run with, randomly initialised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig


@dataclass(frozen=True)
class Shape:
    """A decoder's size; `layers` may be cut, since every layer costs the same."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int

    def kv_bytes(self, batch: int, context: int, element_bytes: int = 2) -> int:
        entry = 2 * self.kv_heads * self.head_dim * element_bytes
        return self.layers * batch * context * entry


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 64, 8192),
    "small": Shape(8, 512, 8, 4, 64, 2048),
    "8b-layers": Shape(4, 4096, 32, 8, 128, 14336),
    "tiny": Shape(2, 64, 4, 2, 64, 128),  # to see that a script works
}
SHAPES["1b-whole"] = SHAPES["1b"]  # where a benchmark cuts 1b, all its layers


def make_config(shape: Shape, context: int) -> LlamaConfig:
    """A Llama of this shape, with room for `context` positions."""
    return LlamaConfig(
        vocab_size=4096,  # the head is no part of what is compared
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context + 4096,
        tie_word_embeddings=True,
        rope_theta=500000.0,
    )


def make_model(shape: Shape, context: int, dtype: torch.dtype = torch.bfloat16):
    """A Llama of this shape with random weights, in eval mode; room for `context` positions."""
    config = make_config(shape, context)
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(previous)
