"""Model shapes that the benchmarks run with, randomly initialised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig, PretrainedConfig

from kvswap_torch.hf.latent import Latent


@dataclass(frozen=True)
class Shape:
    """A decoder's size; `layers` may be cut, since every layer costs the same.

    With a `latent` its attention is DeepSeek V2's: `kv_heads` is 1, and `head_dim` what a token
    leaves behind.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    latent: Latent | None = None

    def kv_bytes(self, batch: int, context: int, element_bytes: int = 2) -> int:
        entry = self.kv_heads * sum(self.cached_widths) * element_bytes
        return self.layers * batch * context * entry

    @property
    def cached_widths(self) -> tuple[int, int]:
        """Of what a head caches of a token as key and as value: both parts of a latent."""
        if self.latent is not None:
            return self.latent.rank, self.latent.rotary
        return self.head_dim, self.head_dim


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 64, 8192),
    "small": Shape(8, 512, 8, 4, 64, 2048),
    "8b-layers": Shape(4, 4096, 32, 8, 128, 14336),
    "tiny": Shape(2, 64, 4, 2, 64, 128),  # to see that a script works
}
# Widths of DeepSeek-V2-Lite, 4 of its 27 layers. Its first layer's dense MLP is in all of them: the
# 8 experts that a token meets in the others are as wide, 11,264; router and others are left out.
SHAPES["v2-lite"] = Shape(4, 2048, 16, 1, 576, 10944, Latent(512, 64, 128, 128))
SHAPES["tiny-latent"] = Shape(2, 64, 4, 1, 64, 128, Latent(56, 8, 16, 16))
SHAPES["1b-whole"] = SHAPES["1b"]  # where a benchmark cuts 1b, all its layers


def make_config(shape: Shape, context: int) -> PretrainedConfig:
    """A Llama of this shape, or a DeepSeek V2, with room for `context` positions."""
    common = {
        "vocab_size": 4096,  # the head is no part of what is compared
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": context + 4096,
        "tie_word_embeddings": True,
    }
    latent = shape.latent
    if latent is None:
        heads = {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
        return LlamaConfig(**common, **heads, rope_theta=500000.0)
    return DeepseekV2Config(
        **common,
        num_key_value_heads=shape.heads,
        kv_lora_rank=latent.rank,
        q_lora_rank=None,
        qk_rope_head_dim=latent.rotary,
        qk_nope_head_dim=latent.unrotated,
        v_head_dim=latent.value,
        first_k_dense_replace=shape.layers,
    )


def make_model(shape: Shape, context: int, dtype: torch.dtype = torch.bfloat16):
    """`make_config`'s model with random weights, in eval mode."""
    config = make_config(shape, context)
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(previous)
