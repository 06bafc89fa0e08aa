"""What groups are worth to a session of the executable specification."""

from __future__ import annotations

import dataclasses
import functools

import torch

from tests.python.reference_methods import METHODS
from tests.python.reference_methods.two_stages import in_two_stages


class Scores:
    """A part of `ReferenceSession`, whose layers and projections it reads."""

    def _group_scores(self, layer, sequence, query: torch.Tensor, wanted: int) -> torch.Tensor:
        """query: [heads or kv_heads, queries, head_dim] -> [queries, groups]."""
        state, options = self._layers[layer], self._options
        method = METHODS[options.rows]
        if options.rows == "box":
            weighed = functools.partial(method.group_scores, bound_weight=options.bound_weight)
            method = dataclasses.replace(method, group_scores=weighed)
        of_score = method.group_scores if options.score == "sum" else method.best_head_scores
        projections, columns = self._projections.get(layer), options.score_columns

        def scores(by):
            # A row of a token is left out while it is padding; one of a group stays as it was made.
            is_of_token = method.takes_projections
            valid = (state.valid if is_of_token else state.rowed)[sequence].clone()
            valid[sorted(state.kept[sequence].excluded)] = False
            keys = state.scored[sequence]
            seen = keys[:, : state.sealed], valid[: state.sealed]
            return of_score(*seen, query, options.group_tokens, by)

        whole = scores(projections)
        if columns is None or columns >= projections[0].shape[1]:
            return whole
        first = scores([matrix[:, :columns] for matrix in projections])
        wanted = min(wanted, whole.shape[1])
        return in_two_stages(first, whole, options.group_tokens, options.score_share, wanted)

    def _group_masses(self, layer, sequence, query, scale: float) -> torch.Tensor:
        """query: [heads, queries, head_dim] -> [queries, groups]: each head's softmax over low-rank
        products of what may be chosen, summed in the group, joined over heads."""
        state, options = self._layers[layer], self._options
        key_projection, query_projection = self._projections[layer]
        keys = state.scored[sequence, :, : state.sealed].float()
        rows = keys.transpose(0, 1).flatten(1) @ key_projection
        ratio = options.query_heads // options.kv_heads
        of_head = query_projection.unflatten(0, (options.kv_heads, -1)).repeat_interleave(ratio, 0)
        logits = query.float() @ of_head @ rows.T * scale  # [heads, queries, sealed]
        whole = state.kept[sequence].whole_groups(options.group_tokens)
        attended = [*self._groups(state, sequence)[0], *whole]
        sinks = torch.tensor(attended, dtype=torch.long)
        is_sink = torch.isin(torch.arange(state.sealed) // options.group_tokens, sinks)
        hidden = is_sink | ~state.valid[sequence, : state.sealed]
        mass = logits.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        groups = mass.unflatten(2, (-1, options.group_tokens)).sum(3)
        return groups.sum(0) if options.score == "mass" else groups.amax(0)
