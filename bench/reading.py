"""A model to time, and a document with facts and questions for it to read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.tuning.documents import default_samples
from kvswap_torch.tuning.samples import Sample

CHUNK = 2048  # tokens of a prompt that are read at once


def open_held_out(model: Path, length: int) -> tuple[Any, Sample]:
    """The model in a folder, and a held-out document of so many tokens."""
    network = load_model(str(model))
    _, (sample, *_) = default_samples(load_tokenizer(str(model)), (length,), 2)
    return network, sample


@torch.inference_mode()
def read(network: Any, cache: Any, ids: torch.Tensor) -> None:
    """A cache takes in a text, ``[tokens]`` int64, a chunk at a time."""
    for chunk in ids.split(CHUNK):
        network(input_ids=chunk[None], past_key_values=cache, logits_to_keep=1)


@torch.inference_mode()
def step(network: Any, cache: Any, token: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds that one more token takes in a cache, and its logits ``[1, vocabulary]``."""
    began = time.perf_counter()
    output = network(input_ids=token.view(1, 1), past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - began, output.logits[0]
