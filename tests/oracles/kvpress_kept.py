"""Which tokens and channels NVIDIA's kvpress keeps of the prompts of `models`.

By hand, in an environment of its own, since it wants another transformers than we do:

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install kvpress==0.5.5
    /tmp/oracle/bin/python -m tests.oracles.kvpress_kept

It writes `kvpress.json` beside this file, which `tests/python/test_oracles.py` compares with what
our presets keep. Numbers alone are stored.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    ObservedAttentionPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    ThinKPress,
    TOVAPress,
)
from transformers import DynamicCache

from tests.oracles import models

KEPT = 80  # tokens of each prompt, the newest among them
CHANNELS = 24  # of the keys' 64 that ThinK leaves out

# And the prompt's length: all but the newest tokens, which stay, fill groups of ours.
PRESSES = {
    "snapkv": (SnapKVPress(window_size=32, kernel_size=5), 160),
    "tova": (TOVAPress(), 161),
    "streaming": (StreamingLLMPress(n_sink=4), 160),
}
TOKENS = 160  # of the prompt, for the others


def read(name: str, press: Any, tokens: int) -> DynamicCache:
    """The model's cache after the prompt."""
    model, cache = models.model_of(name), DynamicCache()
    with torch.no_grad(), press(model):
        model(models.prompt_of(name, tokens), past_key_values=cache)
    return cache


def kept_tokens(name: str, press: ScorerPress, tokens: int) -> list[list[list[int]]]:
    """``[layers][kv_heads]``: the tokens that stay, by their keys."""
    press.compression_ratio = 1 - (KEPT + 0.5) / tokens
    whole = read(name, ThinKPress(), tokens)
    found = []
    for full, layer in zip(whole.layers, read(name, press, tokens).layers, strict=True):
        heads = []
        for every, left in zip(full.keys[0], layer.keys[0], strict=True):
            same = (left[:, None] == every[None]).all(dim=-1)
            assert bool((same.sum(dim=1) == 1).all()), "two tokens have one key"
            heads.append(sorted(same.int().argmax(dim=1).tolist()))
        found.append(heads)
    return found


def dropped_channels(name: str) -> list[list[list[int]]]:
    """``[layers][kv_heads]``: channels that ThinK leaves out of the keys."""
    cut = ThinKPress(key_channel_compression_ratio=CHANNELS / models.HEAD_DIM, window_size=32)
    return [
        [torch.where((head == 0).all(dim=0))[0].tolist() for head in layer.keys[0]]
        for layer in read(name, cut, TOKENS).layers
    ]


def mean_attention(name: str) -> list[list[list[float]]]:
    """``[layers][kv_heads][tokens]``: what H2O's normalised form gives each token."""
    given: list[list[list[float]]] = []

    class Told(ObservedAttentionPress):
        def score(self, *arguments: Any) -> torch.Tensor:
            scores = super().score(*arguments)
            given.append([[round(x, 7) for x in head] for head in scores[0].tolist()])
            return scores

    read(name, Told(compression_ratio=0.5), TOKENS)
    return given


def main() -> None:
    versions = ("kvpress", "transformers", "torch")
    told: dict[str, Any] = {
        "command": "python -m tests.oracles.kvpress_kept",
        "versions": {name: importlib.metadata.version(name) for name in versions},
        "kept": KEPT,
    }
    for name in models.MODELS:
        told[name] = {press: kept_tokens(name, *PRESSES[press]) for press in PRESSES} | {
            "channels": dropped_channels(name),
            "mean_attention": mean_attention(name),
        }
    path = Path(__file__).with_name("kvpress.json")
    path.write_text(json.dumps(told, separators=(",", ":")) + "\n")
    print(f"{path}: {len(models.MODELS)} models, versions {told['versions']}")


if __name__ == "__main__":
    main()
