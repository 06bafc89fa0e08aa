"""A GGUF file of the Llama family as a plain Hugging Face folder: bf16 weights and a tokenizer.

Neither the weights nor the tokenizer go through transformers' own GGUF support, which marks a model
as quantised and then refuses to save it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from tools.real_model.source import RealModelError

TRIED = "0.19.0"  # of gguf, as constraints.txt pins it
# Of the bf16 weights that TRIED makes, see `weights_digest`.
WEIGHTS_SHA256 = "842df3b5a6f7ba68d549625602e166d5d090a03074dd370cb4f470a7d3120a96"
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type

# GGUF's names within a block -> those of LlamaForCausalLM within a layer.
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert(gguf: Path, folder: Path, expected: str = WEIGHTS_SHA256) -> None:
    """Writes the model of a GGUF file into an empty folder.

    Parameters
    ----------
    expected
        The `weights_digest` that must come out.

    Raises
    ------
    RealModelError
        Without the package gguf, or when other weights come out than `expected`.
    """
    from safetensors.torch import save_file

    version = _gguf_version()
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = _weights(reader, fields)
    digest = weights_digest(weights)
    if digest != expected:
        raise RealModelError(
            f"real-model: {gguf.name} must give weights with the hash {expected}, gave {digest}, "
            f"with gguf {version}; gguf {TRIED} is known to give them: pip install gguf=={TRIED}"
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(fields))
    _write(folder / "generation_config.json", _special_ids(fields))
    _write_tokenizer(fields, folder)


def _gguf_version() -> str:
    try:
        return importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError as error:
        raise RealModelError(
            f"real-model: the package gguf must be installed: pip install gguf=={TRIED}"
        ) from error


def weights_digest(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _weights(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.removesuffix(".weight").split(".")[-1]
        if part in heads:
            values = _half_rotations(values, heads[part])
        weights[_llama_name(tensor.name)] = values.to(torch.bfloat16)
    return weights


def _half_rotations(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head from pairs that RoPE turns together to halves, as transformers has them."""
    paired = values.unflatten(0, (heads, -1, 2))
    return paired.transpose(1, 2).flatten(0, 2).contiguous()


def _llama_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk" and parts[2] in IN_LAYER:
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.weight"
    if parts[0] in OUTSIDE:
        return f"{OUTSIDE[parts[0]]}.weight"
    raise RealModelError(f"real-model: every tensor must be one of a Llama, got {name!r}")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    } | _special_ids(fields)


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": fields[f"tokenizer.ggml.{its}_token_id"]
            for ours, its in names.items()}  # fmt: skip


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # Its training took each digit by itself ("smollm" among GGUF's kinds).
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {name: tokens[number] for name, number in _special_ids(fields).items()}
    config: dict[str, Any] = {name.removesuffix("_id"): token for name, token in special.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
