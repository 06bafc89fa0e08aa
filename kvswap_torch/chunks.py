"""How a long text is read: in passes of like length."""

from __future__ import annotations

import itertools


def even_chunks(tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Ranges of at most `chunk` tokens that differ by at most one.

    A short last chunk would be treated as a question, which a cache on disk attends over selected
    groups only; a document's own chunks are to be exact.
    """
    count = -(-tokens // chunk)
    edges = [tokens * index // count for index in range(count + 1)] if count else [0]
    return list(itertools.pairwise(edges))
