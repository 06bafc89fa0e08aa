"""Look-ups: heads that attend to where what comes next stands in the text already.

A head of a step *looks up* when a tenth of its attention mass or more is where the next two tokens
stand too, or a few tokens before. An answer that is copied from the text hangs on the few heads
that do so, and on each of its tokens: so every step counts as much as any other, however many heads
look something up in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from kvswap_torch.tuning.observe import Observed, attention_weights

SOUGHT_MIN = 0.1  # of a head's mass: less on what comes next is no look-up
SOURCE_BEFORE = 6  # tokens before a place that belong to it: what it is found by

FoundSteps = dict[int, list[torch.Tensor]]
"""Rank -> for each sample ``[steps]``: weights of look-ups, summed over heads."""


def sources(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Where in the text what comes next stands too: ``[steps, tokens]`` bool.

    Places of the two tokens that follow each position, and a few tokens before each.

    Parameters
    ----------
    ids
        ``[tokens]``.
    positions
        ``[steps]``.
    """
    tokens = len(ids)
    following = torch.full((tokens + 2,), -1)
    following[:tokens] = ids
    wanted = torch.stack([following[positions + 1], following[positions + 2]])
    pairs = torch.stack([ids[:-1], ids[1:]])
    same = (wanted[:, :, None] == pairs[:, None, :]).all(0)
    same &= torch.arange(tokens - 1) + 1 < positions[:, None]
    found = torch.zeros(len(positions), tokens, dtype=torch.bool)
    for shift in range(-SOURCE_BEFORE, 2):
        low, high = max(0, -shift), min(tokens - 1, tokens - shift)
        found[:, low + shift : high + shift] |= same[:, low:high]
    return found


def of_heads(
    seen: Observed, positions: torch.Tensor, wanted: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Head after head: its attention weights, and of these what is looked up.

    Parameters
    ----------
    positions
        ``[steps]``: the queries that look, each up to its own token.
    wanted
        ``[steps, tokens]`` of `sources`; None: nothing is looked up.

    Yields
    ------
    tuple
        Twice ``[steps, tokens]`` fp32.
    """
    query, keys = seen.query[0][:, positions], seen.keys[0]
    later = torch.arange(keys.shape[1]) > positions[:, None]
    repeats = len(query) // len(keys)
    for head, rows in enumerate(query.float()):
        scores = rows @ keys[head // repeats].float().T * seen.scale
        sinks = None if seen.sinks is None else seen.sinks[head : head + 1]
        weights = attention_weights(scores[None], later, seen.softcap, sinks)[0]
        there = torch.zeros_like(weights) if wanted is None else weights * wanted
        yield weights, there * (there.sum(1, keepdim=True) > SOUGHT_MIN)


def attention_views(
    seen: Observed, positions: torch.Tensor, wanted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention weights, mean over heads, and those of look-ups, summed over heads.

    Parameters are those of `of_heads`.

    Returns
    -------
    tuple
        Twice ``[steps, tokens]`` fp32.
    """
    mass, looked_up = torch.zeros(2, len(positions), seen.keys.shape[2])
    for weights, there in of_heads(seen, positions, wanted):
        mass += weights
        looked_up += there
    return mass / seen.query.shape[1], looked_up


def look_up_mass(seen: Observed, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """What of each head's attention is a look-up, ``[heads, steps]``: 0, or a tenth to 1.

    Parameters are those of `of_heads`.
    """
    mass = torch.zeros(seen.query.shape[1], len(positions))
    some = wanted.any(1)  # other steps look nothing up: most of a text's
    for head, (_, there) in enumerate(of_heads(seen, positions[some], wanted[some])):
        mass[head, some] = there.sum(1)
    return mass


def shares_found(
    found: Sequence[Mapping[int, Sequence[torch.Tensor]]], sought: Sequence[Sequence[torch.Tensor]]
) -> list[dict[int, float]]:
    """For each layer, rank -> what is found there of all that the layers seek, mean over steps.

    Their sum over layers is at most 1. Steps that seek nothing do not count; where there is none
    that does, the list is empty.

    Parameters
    ----------
    found
        For each layer `FoundSteps`.
    sought
        For each layer and sample ``[steps]``: the same of all that could be found. A layer without
        samples has none.
    """
    most = max((len(layer) for layer in sought), default=0)
    layers = [layer for layer in sought if len(layer) == most]
    if most == 0:
        return []
    whole = [torch.stack(list(sample)).sum(0) for sample in zip(*layers, strict=True)]
    seeking = sum(int((steps > 0).sum()) for steps in whole)
    if seeking == 0:
        return []
    each = [torch.where(steps > 0, 1 / steps.clamp_min(1e-30), 0.0) / seeking for steps in whole]
    return [
        {
            rank: sum(
                float((steps * weights).sum())
                for steps, weights in zip(samples, each, strict=False)
            )
            for rank, samples in layer.items()
        }
        for layer in found
    ]
