"""Tiny Llamas as GGUF files, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

from tests.python.tiny_models import tiny_model

SIZES = {"hidden_size": 64, "head_dim": 16, "vocab_size": 288}


def model_of(**changes: Any) -> Any:
    return tiny_model("llama", **(SIZES | changes))


def written(model: Any, path: Path, kind: str = "Q8_0", architecture: str = "llama") -> Path:
    """The model as a GGUF file, with a tokenizer of bytes; queries and keys in GGUF's order."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        for part, count in heads.items():
            if part in name:
                split = values.reshape(count, 2, -1, values.shape[1])
                values = split.swapaxes(1, 2).reshape(values.shape)
        layer, _, suffix = name.rpartition(".")
        if layer == "lm_head" and config.tie_word_embeddings:
            continue
        target = f"{names.get_name(layer)}.{suffix}"
        if values.ndim == 2 and kind != "F32":
            quantised = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(values, quantised)
            writer.add_tensor(target, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any, size: int) -> None:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["ab", "cd"]
    tokens += [f"<extra_{index}>" for index in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 2)
