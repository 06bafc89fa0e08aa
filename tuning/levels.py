"""Rank levels: what one number of the solver means for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvswap_torch.tuning.costs import Levels
from kvswap_torch.tuning.rank_budget import hand_out_ranks
from kvswap_torch.tuning.settings import GAIN_MIN


def make_levels(recall: Sequence[Mapping[int, float]], *, uniform: bool = False) -> Levels:
    """A level r gives out r columns a layer on average, to the layers that gain most by them.

    Levels that give the same ranks as a smaller one are left out.

    Parameters
    ----------
    recall
        For each layer, rank -> recall of attention mass; all layers the same ranks.
    uniform
        The paper's way: r columns to every layer.
    """
    found: dict[int, tuple[int, ...]] = {}
    for rank in sorted(recall[0]):
        budget = rank * len(recall)
        ranks = (rank,) * len(recall) if uniform else hand_out_ranks(recall, sum, budget, GAIN_MIN)
        if ranks not in found.values():
            found[rank] = ranks
    return Levels(found)
