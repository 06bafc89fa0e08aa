"""Forward passes: how a long text is divided into them, and what each is."""

from __future__ import annotations

import itertools
from typing import Literal

Pass = Literal["prefill", "decode"]  # as kvswap::Pass


def pass_of(tokens: int, select_queries_max: int) -> Pass:
    """What a model's forward pass of `tokens` new tokens is to its cache.

    transformers does not say what it runs a pass for, so that a few tokens are a step of an answer,
    or a question: they attend over what they select. Who drives a session says it himself.
    """
    return "decode" if tokens <= select_queries_max else "prefill"


def even_chunks(tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Ranges of at most `chunk` tokens that differ by at most one.

    A short last chunk would be treated as a question, which a cache on disk attends over selected
    groups only; a document's own chunks are to be exact.
    """
    count = -(-tokens // chunk)
    edges = [tokens * index // count for index in range(count + 1)] if count else [0]
    return list(itertools.pairwise(edges))
