"""Which clusters stand side by side on disk: those that are read together (DynaKV 5.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

CO_READ_MIN = 2  # fewer times may be chance


def chained(choices: Sequence[Sequence[int]], count: int) -> list[int]:
    """An order of clusters in which many that were chosen together are neighbours.

    Pairs join in falling number of steps that chose both, while each is at an end of its chain and
    the chains differ. Chains stand in the order of their lowest cluster.

    Parameters
    ----------
    choices
        Of each step: numbers of clusters.
    count
        Of all clusters; those that nobody chose stand alone.

    Returns
    -------
    list of int
        All numbers, each once.
    """
    together: Counter[tuple[int, int]] = Counter()
    for step in choices:
        together.update(combinations(sorted(step), 2))
    chain_of = {cluster: [cluster] for cluster in range(count)}
    for (a, b), times in sorted(together.items(), key=lambda pair: (-pair[1], pair[0])):
        left, right = chain_of[a], chain_of[b]
        ends = a in (left[0], left[-1]) and b in (right[0], right[-1])
        if times < CO_READ_MIN or left is right or not ends:
            continue
        if left[-1] != a:
            left.reverse()
        if right[0] != b:
            right.reverse()
        left.extend(right)
        chain_of.update(dict.fromkeys(right, left))
    chains = {id(chain): chain for chain in chain_of.values()}.values()
    return [cluster for chain in sorted(chains, key=min) for cluster in chain]
