"""What the rows of each method choose, in a few lines of plain torch.

The C++ engine is compared with these on every back end. A method is one module here, one
`SummaryEncoder` in `csrc/methods/summary/` and a line in each registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.python.reference_methods import kvswap, quest, shadowkv

__all__ = ["METHODS", "Method", "Projections"]

Projections = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """One choice of `summary.kind`.

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
        ``[heads, queries, head_dim]``; by the sum over heads (`selection.score`). What is
        attended are the groups with the largest scores, the lower number first among equals; a
        group without a valid token scores -inf. None: nothing is chosen, everything is attended;
        what is chosen are clusters (`reference_methods.clusters`); or a plug-in says what groups
        are worth (`kvswap_torch.plug_ins`).
    """

    name: str
    source: str
    takes_projections: bool
    group_scores: Callable[..., torch.Tensor] | None

    def best_head_scores(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor,
        query: torch.Tensor,
        group_tokens: int,
        projections: Projections | None = None,
    ) -> torch.Tensor:
        """The same with ``score="max"``: what the group is worth to the head it is worth most to.

        A head's query meets its own KV head's keys alone.
        """
        if self.group_scores is None:
            raise ValueError(f"{self.name}: groups are not scored by its rows")
        alone = torch.zeros_like(query)
        of_heads = []
        for head in range(len(query)):
            alone.zero_()[head] = query[head]
            of_heads.append(self.group_scores(keys, valid, alone, group_tokens, projections))
        return torch.stack(of_heads).amax(0)


#: By the name of the rows, as in `summary.kind`.
METHODS = {
    "low_rank": Method("kvswap", "KVSwap, 3.2 and 3.3", True, kvswap.group_scores),
    "box": Method("quest", "Quest, 3.2", False, quest.group_scores),
    "mean": Method("shadowkv", "ShadowKV, 4.1", False, shadowkv.group_scores),
    "centroid": Method("dynakv", "DynaKV, 4.1", False, None),
    "given": Method("group_scores", "a plug-in's", False, None),
    "none": Method("exact", "FlexGen", False, None),
}
