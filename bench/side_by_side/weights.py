"""Random weights in one file, mapped by every child, so that they are in memory once."""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bench.shapes import Shape, make_config, make_model
from kvswap_torch.few_bits import FewBitLinear, bits_by_layer, put_in_place

WEIGHT_BYTES = {"bf16": 2, "int8": 1, "int4": 0.625}  # of int4 with scale and zero of 32


def weights_file(shape: Shape, folder: Path) -> Path:
    """Written when it is not there; the name says which shape it is."""
    numbers = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim)
    latent = () if shape.latent is None else astuple(shape.latent)
    name = "-".join(map(str, (*numbers, shape.feed_forward, *latent)))
    path = folder / f"weights-{name}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        state = make_model(shape, 0).state_dict()
        state.pop("lm_head.weight")  # tied
        unfinished = path.with_suffix(".part")
        save_file(state, unfinished)
        os.replace(unfinished, path)
    return path


def load_model(shape: Shape, context: int, path: Path) -> Any:
    """The model with `path` mapped for its weights: its pages are the page cache's."""
    config = make_config(shape, context)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(load_file(path), strict=False, assign=True)
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.is_meta]  # fmt: skip
    if left:
        raise ValueError(f"{path.name}: must hold every weight, got none for {', '.join(left)}")
    return model.eval()


def put_in_few_bits(model: Any, weights: str) -> None:
    """Linear layers in int8 or int4, as commands load them with ``--weights``."""
    for name, bits in bits_by_layer(model, weights).items():
        layer = model.get_submodule(name)
        put_in_place(model, name, FewBitLinear.of(layer, layer.weight.data, bits))


def read_through(path: Path) -> None:
    """Puts a file into the page cache, on this process's account."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        while file.readinto(buffer):
            pass


def touched_bytes(shape: Shape, vocabulary: int = 4096, weights: str = "bf16") -> int:
    """Of weights read in a step, whatever the batch; the head, tied to the input, in bf16."""
    latent, heads = shape.latent, shape.heads
    if latent is None:
        attention = shape.hidden * shape.head_dim * 2 * (heads + shape.kv_heads)
    else:
        outer = heads * (latent.query_dim + latent.value) + latent.head_dim
        inner = latent.rank * heads * (latent.unrotated + latent.value)
        attention = shape.hidden * outer + inner
    layer = attention + 3 * shape.hidden * shape.feed_forward
    return int(WEIGHT_BYTES[weights] * shape.layers * layer) + 2 * vocabulary * shape.hidden
