"""The session's executable specification: plain torch, everything in memory.

`ReferenceSession` has the interface of `kvswap_torch._C.TensorCache`, which is compared with it.

A layer's positions are, from the left: sealed groups of G positions, then the tail. What a query
attends: the tail, the sink groups, and the chosen ones of the other sealed groups. With records
of fp8 or int4 a group is rounded when it is sealed, a sink is not; groups are scored by the keys
that they were sealed with.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch

from kvswap_torch.errors import ClosedError
from tests.python.reference_decisions import Decisions
from tests.python.reference_dropping import Dropping
from tests.python.reference_keeper import ReferenceKeeper, as_kept
from tests.python.reference_kept import Kept
from tests.python.reference_methods import METHODS
from tests.python.reference_options import COUNTERS, Options
from tests.python.reference_scores import Scores
from tests.reference import rounded_records
from tests.selections import Judged, assert_same_choices


@dataclass
class Layer:
    """One layer: every position's K, V and validity, how many of them are sealed, and the plan."""

    keys: torch.Tensor  # [batch, kv_heads, positions, head_dim]
    values: torch.Tensor  # as keys
    valid: torch.Tensor  # [batch, positions] bool
    came: torch.Tensor  # as valid, when they came: of sinks
    rowed: torch.Tensor  # as valid, when they were sealed: what rows of groups are made of
    scored: torch.Tensor  # as keys: what groups are scored by
    kept: list[Kept]  # [batch]
    sealed: int = 0  # positions in sealed groups, a multiple of G
    predicted: list[list[int]] | None = None  # look_ahead()'s choice, [batch][groups]
    selection: list[list[int]] = field(default_factory=list)
    last: list[list[int]] = field(default_factory=list)  # attended by the step before
    prefilled: int = 0  # positions, the newest prefill's with all before it
    given: torch.Tensor | None = None  # [batch, queries, groups]
    gone: list[int] = field(default_factory=list)  # [batch]: positions before have no records
    judged: list[Judged] = field(default_factory=list)  # what the selection was made by

    @property
    def positions(self) -> int:
        return self.keys.shape[2]


class ReferenceSession(Dropping, Scores, Decisions):
    """Exact selection semantics of KVSwap (sections 3.2-3.4) over tensors in memory."""

    def __init__(self, options: Options):
        Decisions.__init__(self, options)
        ranks = list(options.ranks)
        self._ranks = ranks * options.layers if len(ranks) == 1 else ranks
        self._projections: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._closed = False
        self._keeper = ReferenceKeeper(options, self._fits)
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._follows: list[list[list[int]]] | None = None
        self.choices = {"same": 0, "rounded": 0}
        self.reset()

    # What comes in.

    def begin_pass(self, kind: str, valid: torch.Tensor | None = None) -> None:
        self._open()
        self.kind = kind
        if valid is not None:
            self._declared = dict.fromkeys(range(self._options.layers), valid.bool().clone())

    def declare_held(self, valid: torch.Tensor) -> None:
        self._open()
        for state in self._layers.values():
            if valid.shape != state.came.shape or (valid & ~state.came).any():
                raise ValueError(f"declare_held: {valid.shape} must narrow what came")
            state.valid, state.predicted = valid.clone(), None
            state.rowed[:, state.sealed :] = valid[:, state.sealed :]

    def held_valid(self) -> torch.Tensor:
        """[batch, positions], to be narrowed."""
        return next(iter(self._layers.values())).valid.clone()

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._store(layer, keys, values)
        if self.kind == "prefill" or self._is_restored(layer):
            self._seal(self._layers[layer])

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._open()
        batch, _, tokens, _ = keys.shape
        if self.batch() not in (0, batch):
            raise ValueError(f"append: batch must stay {self.batch()}, got {batch}")
        if self.kind == "decode" and tokens > self._options.select_queries_max:
            raise ValueError(f"append: {tokens} tokens are too many to decode")
        valid = self._declared.pop(layer, None)
        if valid is None:
            valid = torch.ones(batch, tokens, dtype=torch.bool)
        if tuple(valid.shape) != (batch, tokens):
            raise ValueError(f"append: declared {valid.shape}, got {(batch, tokens)} positions")
        old = self._layers.get(layer)
        if old is None:
            kept = [Kept() for _ in range(batch)]
            self._layers[layer] = Layer(
                keys.clone(),
                values.clone(),
                valid,
                valid.clone(),
                valid.clone(),
                keys.clone(),
                kept,
            )
            self._layers[layer].gone = [0] * batch
        else:
            if self.kind == "prefill":
                self._have_turn(old)
            old.keys = torch.cat([old.keys, keys], 2)
            old.values = torch.cat([old.values, values], 2)
            old.valid = torch.cat([old.valid, valid], 1)
            old.came = torch.cat([old.came, valid], 1)
            old.rowed = torch.cat([old.rowed, valid], 1)
            old.scored = torch.cat([old.scored, keys], 2)
        if self.kind == "prefill":
            self._layers[layer].prefilled = self._layers[layer].positions

    def set_projection(self, layer, key_projection, query_projection) -> None:
        self._open()
        shape = (self._options.kv_heads * self._options.head_dim, self._ranks[layer])
        for name, matrix in (("key", key_projection), ("query", query_projection)):
            if tuple(matrix.shape) != shape:
                raise ValueError(f"set_projection: {name} must be {shape}, got {matrix.shape}")
        self._estimated.pop(layer, None)
        self._projections[layer] = (key_projection.float(), query_projection.float())
        if layer in self._layers:  # what is sealed is read back for its summary
            self._layers[layer].scored = self._layers[layer].keys.clone()

    # What goes out.

    def look_ahead(self, layer: int, query: torch.Tensor, scale=None, since_ns: int = 0) -> None:
        """query: [batch, heads or kv_heads, queries, head_dim]."""
        self._open()
        state = self._layers.get(layer)
        if state is None or self.kind == "prefill" or self.prediction == "off":
            return
        if self._is_restored(layer) or (self._must_choose(state) and self._lacks_projection(layer)):
            return
        self._turn(state, state.positions)
        if self.prediction == "verify" and self._must_choose(state):
            return  # what is prefetched changes no choice
        scale = query.shape[3] ** -0.5 if scale is None else scale
        state.predicted = state.selection = self._choose(layer, query, scale)

    def attend(self, layer, query, scale: float, softcap: float = 0.0, sinks=None) -> torch.Tensor:
        """query: [batch, heads, tokens, head_dim]; returns [batch, tokens, heads, head_dim]."""
        self._open()
        state = self._layers[layer]
        self._scale = scale
        self._keeper.softcap, self._keeper.head_sinks = softcap, sinks
        tokens = query.shape[2]
        if self.kind == "prefill" or self._is_restored(layer):
            terms = (scale, softcap, sinks)
            visible = state.valid & ~self._dropped(state)
            output, (_, log_sum_exp) = self._attention(state, query, visible, terms)
            if self._keeper.is_on and not self._is_exact(layer):
                self._keeper.observe_chunk(state, query, log_sum_exp)
            self._seal(state)
            if state.positions == tokens and not self._keeper._is_given:  # its worth comes later
                self._have_turn(state)
            state.selection, state.judged = [], []  # nothing was chosen
            state.last = []
            return output
        chosen = state.predicted
        if chosen is None:
            self._turn(state, state.positions - tokens)
            chosen = self._choose(layer, query, scale)
        state.predicted, state.selection, state.last = None, chosen, chosen
        visible = state.valid & self._attended_positions(state, chosen)
        terms = (scale, softcap, sinks)
        output, (weights, _) = self._attention(as_kept(state), query, visible, terms)
        if self._keeper.is_on and not self._is_exact(layer):
            self._keeper.observe_step(state, weights, query)
            self._observe_kept(state, weights)
        self._count(chosen)
        self._seal(state)
        self._let_go(state)
        return output

    def extend(self, layer, query, keys, values, scale: float, *terms) -> torch.Tensor:
        self._estimate_from_chunk(layer, query, keys)
        self._store(layer, keys, values)  # what is long is sealed when it has attended
        self._estimate_late(layer, keys.shape[2])
        return self.attend(layer, query, scale, *terms)

    def extend_expanded(
        self, layer, query, weight, unrotated: int, keys, scale: float, *terms
    ) -> torch.Tensor:
        """By absorbed queries: the same numbers."""
        plain, rotated = query[..., :unrotated], query[..., unrotated:]
        asked = torch.cat([plain @ weight[:, :unrotated], rotated], -1)
        output = self.extend(layer, asked, keys, keys, scale, *terms)[..., : weight.shape[2]]
        values = weight[:, unrotated:].transpose(1, 2)
        return (output.transpose(1, 2) @ values).transpose(1, 2)

    def give_scores(self, layer: int, scores: torch.Tensor) -> None:
        self._layers[layer].given = scores

    def give_worth(self, layer: int, worth: torch.Tensor, decay: torch.Tensor | None) -> None:
        self._scale = 1.0  # nothing is weighed
        self._keeper.give_worth(self._layers[layer], worth, decay)

    def sealed_groups(self, layer: int) -> int:
        return self._layers[layer].sealed // self._options.group_tokens

    def needs_projection(self, layer: int) -> bool:
        state = self._layers.get(layer)
        return state is not None and self._lacks_projection(layer) and self._must_choose(state)

    def attends_all(self, layer: int) -> bool:
        return layer not in self._layers or not self._must_choose(self._layers[layer])

    def read_back(self, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._open()
        state = self._layers[layer]
        return state.keys[:, :, begin:end].clone(), state.values[:, :, begin:end].clone()

    def last_selection(self, layer: int) -> list[list[int]]:
        return self._layers[layer].selection if layer in self._layers else []

    def last_judged(self, layer: int) -> list[Judged]:
        """What each sequence's selection was made by."""
        return self._layers[layer].judged if layer in self._layers else []

    # The whole cache.

    def select_sequences(self, indices: list[int]) -> None:
        self._open()
        index = torch.as_tensor(indices, dtype=torch.long)
        for state in self._layers.values():
            state.keys, state.values = state.keys[index], state.values[index]
            state.valid, state.predicted = state.valid[index], None
            state.came, state.rowed = state.came[index], state.rowed[index]
            state.scored = state.scored[index]
            state.kept = [copy.deepcopy(state.kept[i]) for i in indices]
            state.gone = [state.gone[i] for i in indices]
            state.last = []

    def crop(self, positions: int) -> None:
        self._open()
        self._crop_gone(positions)
        self._forget_estimates(positions)
        self._declared = {}
        for state in self._layers.values():
            is_cut = positions < state.positions
            state.last = [] if is_cut else state.last
            state.keys, state.values = state.keys[:, :, :positions], state.values[:, :, :positions]
            state.valid, state.predicted = state.valid[:, :positions], None
            state.came = state.came[:, :positions]
            state.sealed = min(state.sealed, self._sealed_at(state.positions))
            state.prefilled = min(state.prefilled, state.positions)
            came_back = state.keys[:, :, state.sealed :]
            state.scored = torch.cat([state.scored[:, :, : state.sealed], came_back], 2)
            of_rows = state.rowed[:, : state.sealed], state.valid[:, state.sealed :]
            state.rowed = torch.cat(of_rows, 1)
            for kept in state.kept if is_cut else []:
                kept.crop(state.sealed, positions, self._options.select_queries_max)

    def reset(self) -> None:
        self._open()
        self._forget_estimates(0)
        self.kind = "prefill"
        self._layers: dict[int, Layer] = {}
        self._keeper.states = self._layers
        self._declared: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        self._closed, self._layers = True, {}

    def positions(self, layer: int) -> int:
        return self._layers[layer].positions if layer in self._layers else 0

    def common_positions(self) -> int:
        positions = {self.positions(layer) for layer in range(self._options.layers)}
        return positions.pop() if len(positions) == 1 else -1

    def batch(self) -> int:
        return next((len(state.keys) for state in self._layers.values()), 0)

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def facts(self) -> dict[str, str]:
        facts = {"device": "cpu", "reader": "memory", "io_mode": "memory", "fallbacks": ""}
        return facts | {"look_ahead": self.prediction}

    def ledger(self) -> dict[str, int]:
        size = sum(2 * state.keys.nbytes for state in self._layers.values())
        return {"pages": size, "total": size, "peak": size, "limit": -1}

    # How.

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("session: must be open, was closed")

    def _sealed_at(self, positions: int) -> int:
        group = self._options.group_tokens
        return max(0, positions - self._options.tail_tokens) // group * group

    def _seal(self, state: Layer) -> None:
        before, group = state.sealed, self._options.group_tokens
        state.sealed = max(state.sealed, self._sealed_at(state.positions))
        records = self._options.records
        for sequence in range(0 if records == "model" else len(state.keys)):
            sinks = self._groups(state, sequence)[0]
            for g in set(range(before // group, state.sealed // group)) - set(sinks):
                parts = [
                    side[sequence, :, g * group : (g + 1) * group]
                    for side in (state.keys, state.values)
                ]
                for part, rounded in zip(parts, rounded_records(records, *parts), strict=True):
                    part.copy_(rounded)

    def _groups(self, state: Layer, sequence: int) -> tuple[list[int], list[int]]:
        """(sink groups, the others with a token that came valid) among a sequence's sealed ones."""
        group = self._options.group_tokens
        valid = state.came[sequence].nonzero().flatten().tolist()
        sinks = {position // group for position in valid[: self._options.sink_tokens]}
        alive = {position // group for position in valid if position < state.sealed}
        return sorted(sinks & alive), sorted(alive - sinks)

    def _is_exact(self, layer: int) -> bool:
        is_restored = self._options.rows == "none" and self._options.keeper == "none"
        return is_restored or layer in self._options.exact_layers

    def _is_restored(self, layer: int) -> bool:
        return self._is_exact(layer) and self._must_choose(self._layers[layer])

    def _must_choose(self, state: Layer) -> bool:
        return not all(self._fits(state, s) for s in range(len(state.keys)))

    def _fits(self, state: Layer, sequence: int) -> bool:
        return len(self._groups(state, sequence)[1]) <= self._options.groups_max

    def _observe_kept(self, state: Layer, weights: torch.Tensor) -> None:
        """As if what is due had left the tail."""
        then = copy.copy(state)
        then.sealed = max(state.sealed, self._sealed_at(state.positions))
        for sequence in range(len(state.keys) if self._keeper.joins else 0):
            state.kept[sequence].seen = max(state.kept[sequence].seen, state.positions)
            state.kept[sequence].stay = None
            if not self._fits(then, sequence):
                sinks = self._groups(then, sequence)[0]
                self._keeper.observe_kept(then, sequence, sinks, weights[sequence])

    def _choose(self, layer: int, query: torch.Tensor, scale: float) -> list[list[int]]:
        """Per sequence: union over the queries of each one's best groups, in rising order."""
        state, queries = self._layers[layer], query.shape[2]
        at_most = min(self._options.groups_max, max(1, self._options.pages_max // queries))
        chosen, state.judged = [], [None] * len(state.keys)
        for sequence in range(len(state.keys)):
            _, others = self._groups(state, sequence)
            if self._fits(state, sequence):
                chosen.append([g for g in others if self._is_selectable(state, sequence, g)])
                continue
            if self._options.rows == "none":  # nothing but what is kept
                chosen.append([])
                continue
            whole = state.kept[sequence].whole_groups(self._options.group_tokens)
            candidates = [g for g in others if g not in whole and self._counts(state, sequence, g)]
            is_shared, kept = self._options.keep_share == "auto", state.kept[sequence]
            fewer = len(kept.positions) // self._options.group_tokens if is_shared else 0
            count = max(1, at_most - fewer)
            if self._lacks_projection(layer):
                raise ValueError(f"attend: layer {layer} must choose groups, has no projection")
            if self._options.rows == "given":
                scores = state.given[sequence]
            elif self._options.score in ("sum", "max"):
                scores = self._group_scores(layer, sequence, query[sequence], count)
            else:
                scores = self._group_masses(layer, sequence, query[sequence], scale)
            best = scores[:, candidates]
            order = best.sort(dim=1, descending=True, stable=True).indices[:, :count]
            chosen.append(self._of_new_ones_the_best(state, sequence, candidates, order))
            by = torch.full_like(scores, -torch.inf)
            by[:, candidates] = best
            state.judged[sequence] = by, count
        return self._followed(layer, chosen)

    def _of_new_ones_the_best(self, state, sequence, candidates, order) -> list[int]:
        """Of each query's choice what the step before attended, and the best part of it."""
        last = set(state.last[sequence]) if state.last else set()
        ratio = self._options.new_group_ratio or 1.0
        most = math.ceil(ratio * order.shape[1]) if last else order.shape[1]
        chosen = {candidates[i] for i in order[:, :most].flatten().tolist()}
        chosen |= {candidates[i] for i in order.flatten().tolist()} & last
        return sorted(chosen)

    def follow(self, choices: list[list[list[int]]] | None) -> None:
        """Choices of another implementation, by layer and sequence, for the pass that comes: what
        is chosen here must be the same within rounding, and theirs are attended."""
        self._follows = choices

    def _followed(self, layer: int, chosen: list[list[int]]) -> list[list[int]]:
        if self._follows is None:
            return chosen
        theirs = [list(groups) for groups in self._follows[layer]]
        same = assert_same_choices(chosen, theirs, self._layers[layer].judged)
        self.choices["same" if same else "rounded"] += 1
        return theirs

    def _counts(self, state: Layer, sequence: int, g: int) -> bool:
        group = self._options.group_tokens
        return bool(state.valid[sequence, g * group : (g + 1) * group].any())

    def _is_selectable(self, state: Layer, sequence: int, g: int) -> bool:
        group = self._options.group_tokens
        positions = set(range(g * group, (g + 1) * group)) - state.kept[sequence].positions
        return any(state.valid[sequence, position] for position in positions)

    def _lacks_projection(self, layer: int) -> bool:
        takes = METHODS[self._options.rows].takes_projections and not self._is_exact(layer)
        return takes and layer not in self._projections

    def _attended_positions(self, state: Layer, chosen: list[list[int]]) -> torch.Tensor:
        group = self._options.group_tokens
        attended = torch.zeros_like(state.valid)
        attended[:, state.sealed :] = True
        for sequence, groups in enumerate(chosen):
            for g in groups + self._groups(state, sequence)[0]:
                attended[sequence, g * group : (g + 1) * group] = True
            attended[sequence, sorted(state.kept[sequence].positions)] = True
        return attended

    def _attention(self, state, query, visible, terms):
        """visible: [batch, positions]. A query that sees nothing gives zeros. Output, and what was
        paid: weights [batch, heads, queries, positions], log-sum-exps [batch, heads, queries]."""
        scale, softcap, sinks = terms
        tokens, positions = query.shape[2], state.positions
        repeats = query.shape[1] // state.keys.shape[1]
        keys = state.keys.float().repeat_interleave(repeats, 1)
        values = state.values.float().repeat_interleave(repeats, 1)
        causal = torch.ones(tokens, positions, dtype=torch.bool).tril(positions - tokens)
        mask = causal & visible[:, None, None, :]
        scores = query.float() @ keys.transpose(2, 3) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            position = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, position], -1)
            values = torch.nn.functional.pad(values, (0, 0, 0, 1))
        weights = scores.softmax(-1).nan_to_num(0.0)
        output = (weights @ values).to(query.dtype).transpose(1, 2)
        return output, (weights[..., :positions], scores.logsumexp(-1))

    def _count(self, chosen: list[list[int]]) -> None:
        counts = {"steps": 1, "sequences": len(chosen), "groups_attended": sum(map(len, chosen))}
        for name, value in counts.items():
            self._counters[name] += value
