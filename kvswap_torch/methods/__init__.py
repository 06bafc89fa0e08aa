"""What the rows of each method choose, in a few lines of plain torch.

The definitions that the C++ engine is compared with on every back end, and that experiments can
score with. A method is one module here, one `Rows` in `csrc/methods/` and a line in each registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvswap_torch.methods import kvswap, quest

__all__ = ["METHODS", "Method", "Projections"]

Projections = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """One choice of `SwapConfig.rows`.

    Attributes
    ----------
    name
        Of the method that brought these rows.
    source
        Paper and section.
    takes_projections
        A layer chooses only once it has its pair.
    group_scores
        ``(keys, valid, query, group_tokens, projections) -> [queries, groups]``: keys
        ``[kv_heads, groups * group_tokens, head_dim]`` after RoPE, valid one bool a token, query
        ``[heads, queries, head_dim]``. What is attended are the groups with the largest scores, the
        lower number first among equals; a group without a valid token scores -inf.
    """

    name: str
    source: str
    takes_projections: bool
    group_scores: Callable[..., torch.Tensor]


#: By the name of the rows, as in `SwapConfig.rows`.
METHODS = {
    "low_rank": Method("kvswap", "KVSwap, 3.2 and 3.3", True, kvswap.group_scores),
    "box": Method("quest", "Quest, 3.2", False, quest.group_scores),
}
