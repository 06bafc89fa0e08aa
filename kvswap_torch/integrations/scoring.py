"""How likely a continuation is, decoded over a cache after its context was read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvswap_torch.cache_argument import cache_argument

Scored = tuple[float, bool]


@torch.inference_mode()
def score(model: Any, cache: Any, context: Sequence[int], continuation: Sequence[int]) -> Scored:
    """The log-likelihood of `continuation`, and whether it is what greedy decoding says.

    The context is read in one pass, the continuation decoded.
    """
    from kvswap_torch.hf.families import input_device

    named = cache_argument(model, cache)
    ids = torch.tensor([[*context, *continuation[:-1]]], device=input_device(model))
    read = len(context)
    logits = [model(input_ids=ids[:, :read], **named, logits_to_keep=1).logits[0, -1]]
    for at in range(read, ids.shape[1]):
        logits.append(model(input_ids=ids[:, at : at + 1], **named).logits[0, -1])
    told = torch.stack(logits).float().log_softmax(-1)
    target = torch.tensor(list(continuation), device=told.device)
    paid = told.gather(1, target[:, None]).sum()
    return float(paid), bool((told.argmax(-1) == target).all())
