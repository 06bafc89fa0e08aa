"""The model: a stock Qwen3 of transformers, its loss and its files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from tools.reference_model.checkpoint import write_atomic
from tools.reference_model.dilution import attend_with_text, repeat_heads
from tools.reference_model.tokens import VOCABULARY

# No mask: plain causal attention. A jump in positions would otherwise be read as packing.
CAUSAL = {"full_attention": None}


def causal_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal attention, beside which the last rows may see a long text."""
    if getattr(module, "sees_text", False):
        out = attend_with_text(module, query, key, value, scaling)
    else:
        key, value = (repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def make_config(layers: int = 6, hidden: int = 256, heads: int = 8) -> Qwen3Config:
    """The architecture; smaller numbers serve the tests."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def make_model(config: Qwen3Config) -> Qwen3ForCausalLM:
    """A model with random weights that trains with the attention above."""
    AttentionInterface.register("reference_causal", causal_attention)
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("reference_causal")
    return model


def token_losses(model: Qwen3ForCausalLM, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of predicting each token from those before it, and whether the best guess was right.

    Parameters
    ----------
    ids, positions : Tensor
        `[batch, tokens]`

    Returns
    -------
    tuple of Tensor
        Losses and hits, both `[batch, tokens - 1]`.
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model(input_ids=ids, position_ids=positions, attention_mask=CAUSAL, use_cache=False)
    logits = out.logits[:, :-1].float()
    targets = ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets), logits.argmax(-1) == targets


def export_model(model: Qwen3ForCausalLM, folder: Path, newline: int) -> None:
    """Write bf16 weights and settings; each file is replaced whole.

    Parameters
    ----------
    newline : int
        The token that ends an answer; `generate` stops at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    write_atomic(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    config = model.config.to_dict()
    config.update(architectures=["Qwen3ForCausalLM"], dtype="bfloat16", use_cache=True)
    config.update(bos_token_id=0, eos_token_id=1, pad_token_id=1)
    config.pop("_attn_implementation", None)
    settings = {
        "bos_token_id": 0,
        "eos_token_id": [newline, 1],
        "pad_token_id": 1,
        "do_sample": False,
        "max_new_tokens": 40,
    }
    for name, content in (("config.json", config), ("generation_config.json", settings)):
        write_atomic(folder / name, (json.dumps(content, indent=2) + "\n").encode())


def load_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Take weights that `export_model` wrote.

    Raises
    ------
    ValueError
        When the file is missing or of another architecture.
    """
    path = folder / "model.safetensors"
    if not path.exists():
        raise ValueError(f"init-from: {path} must exist; name a folder with exported weights")
    weights = {name: tensor.float() for name, tensor in load_file(path).items()}
    missing, surplus = model.load_state_dict(weights, strict=False)
    if surplus or set(missing) - {"lm_head.weight"}:
        raise ValueError(
            f"init-from: {path} must fit the model, got missing {missing}, surplus {surplus}"
        )
