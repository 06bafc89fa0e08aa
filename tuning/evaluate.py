"""How well a model goes on from a cache on disk, next to a full cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvswap_torch.config import SwapConfig
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.samples import Sample

TOKENS_MAX = 128  # decoded of a sample


def evaluate(
    model: Any,
    samples: Sequence[Sample],
    config: SwapConfig,
    path: Path,
    kv_memory_bytes: int,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Decodes the questions and answers of samples token by token.

    Returns
    -------
    dict
        ``accuracy`` and ``accuracy_full``: share of tokens guessed right; ``agreement``: share of
        tokens at which both guess the same; ``loss`` and ``loss_full``, nats a token.
    """
    from transformers import DynamicCache

    from kvswap_torch.hf.cache import KVSwapCache

    full, ours, targets = [], [], []
    for number, sample in enumerate(samples):
        if progress is not None:
            progress("evaluating", number, len(samples))
        ids = sample.ids[: sample.focus + TOKENS_MAX]
        with KVSwapCache(
            model,
            path=path,
            config=config,
            kv_memory_bytes=kv_memory_bytes,
            max_context=len(ids),
            max_batch=1,
        ) as cache:
            ours.append(_decode(model, ids, sample.focus, cache))
        full.append(_decode(model, ids, sample.focus, DynamicCache()))
        targets.append(ids[sample.focus :])
    if progress is not None:
        progress("evaluating", len(samples), len(samples))
    target = torch.cat(targets)
    both = {"": torch.cat(ours), "_full": torch.cat(full)}
    found: dict[str, float] = {"tokens": len(target)}
    for name, logits in both.items():
        found[f"accuracy{name}"] = (logits.argmax(-1) == target).float().mean().item()
        found[f"loss{name}"] = F.cross_entropy(logits, target).item()
    same = both[""].argmax(-1) == both["_full"].argmax(-1)
    found["agreement"] = same.float().mean().item()
    return {name: round(value, 4) for name, value in found.items()}


@torch.inference_mode()
def _decode(model: Any, ids: torch.Tensor, focus: int, cache: Any) -> torch.Tensor:
    """Logits of the tokens from `focus` on, ``[tokens, vocabulary]`` fp32."""
    read = model(input_ids=ids[None, :focus], past_key_values=cache, logits_to_keep=1)
    logits = [read.logits[0, -1]]
    for token in ids[focus:-1]:
        step = model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
        logits.append(step.logits[0, -1])
    return torch.stack(logits).float()
