"""What every oracle is asked about: tiny models whose numbers no version of a library changes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy
import torch
import transformers

LAYERS, HEADS, HEAD_DIM = 2, 4, 64
# Name: class of transformers, KV heads.
MODELS = {
    "llama-mha": ("Llama", 4),
    "llama-gqa": ("Llama", 2),
    "qwen3-mha": ("Qwen3", 4),
    "qwen3-gqa": ("Qwen3", 2),
}


def model_of(name: str, attention: str = "eager") -> Any:
    """A model in fp32, its weights drawn by their names: spread, so that attention is not flat."""
    family, kv_heads = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        attn_implementation=attention,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            drawn = numpy.random.default_rng(zlib.crc32(parameter_name.encode()))
            if parameter.dim() == 2:
                numbers = drawn.standard_normal(parameter.shape) / parameter.shape[1] ** 0.5
            else:
                numbers = 1 + 0.2 * drawn.standard_normal(parameter.shape)
            parameter.copy_(torch.from_numpy(numbers))
    return model.float().eval()


def prompt_of(name: str, tokens: int) -> torch.Tensor:
    """``[1, tokens]``."""
    drawn = numpy.random.default_rng(zlib.crc32(name.encode()))
    return torch.from_numpy(drawn.integers(3, 97, (1, tokens)))
