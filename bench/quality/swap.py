"""KVSwap's choice, and the variations of it that a table compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.quality.choosing import Frame
from bench.quality.view import LayerPast, View
from kvswap_torch.methods.kvswap import SUMMARY_LEVELS, kept_rows
from kvswap_torch.projection import Pair, flat_tokens, from_chunk, sum_over_heads

MASSES = ("mass", "max_mass", "mass_kept", "max_mass_kept")
SCORES = ("sum", *MASSES, "softmax", "max")
SECOND_SHARE = 0.2  # of the groups, scored by all columns after `first`


@dataclass(frozen=True)
class Swap:
    """Low-rank keys score tokens, the best groups are attended (KVSwap, sections 3.2 and 3.3).

    Parameters
    ----------
    pairs
        One projection a layer; None: estimated from the document, as the cache does without a
        calibration.
    ranks
        Columns used of each.
    summary_dtype
        As in `SwapConfig`.
    true_query
        Layers that choose with their true query; all others with the predicted one.
    score
        ``sum``: over heads, of raw products (the paper). ``mass``: what each head's softmax over
        what may be chosen gives to a group, summed over heads; ``max_mass``: the largest of any
        head. ``mass_kept`` and ``max_mass_kept``: the same with sinks and tail in the denominator,
        with their exact products; ``softmax``: as mass, but a group counts as its best token.
        ``max``: the largest product of any head.
    heads
        ``all`` KV heads choose together, or ``each`` for itself: as a model with that head alone.
    exact_layers
        Layers that attend to everything: shows which of them a gap comes from.
    projection_kind, rotary
        Of an estimated projection: as in `SwapConfig`, and how many of a head's channels are turned
        by position; None: all.
    first
        Columns that all groups are scored by first; only the best fifth is then scored by all of
        them. Of a score by mass; 0: all groups by all columns.
    """

    frame: Frame
    pairs: Sequence[Pair] | None
    ranks: tuple[int, ...]
    summary_dtype: str = "model"
    true_query: frozenset[int] = frozenset()
    score: str = "sum"
    exact_layers: frozenset[int] = frozenset()
    projection_kind: str = "query_aware"
    heads: str = "all"
    first: int = 0
    rotary: int | None = None

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score: must be one of {', '.join(SCORES)}, got {self.score!r}")
        if self.first and self.score not in MASSES:
            raise ValueError(
                f"first: must be left out unless score is one of {', '.join(MASSES)}, got "
                f"{self.first} and {self.score!r}"
            )

    def choose(self, view: View) -> torch.Tensor | None:
        """``[batch, 1 or kv_heads, n, columns]`` bool; None in layers that attend everything."""
        if view.layer in self.exact_layers:
            return None
        if self.heads == "each" and view.kv_heads > 1:
            heads = range(view.kv_heads)
            return torch.cat([self._of_head(view, h).choose(view.of_head(h)) for h in heads], 1)
        return self.frame.columns(self.frame.best(self._scores(view), view), view)

    def _scores(self, view: View) -> torch.Tensor:
        """``[batch, 1, n, groups]``."""
        if self.score not in MASSES:
            return self._group_products(view)
        if not self.first:
            return self._group_masses(view)
        early = self._group_masses(view, self.first)
        most = max(self.frame.groups_max, round(SECOND_SHARE * early.shape[-1]))
        kept = dataclasses.replace(self.frame, groups_max=most).best(early, view)
        return self._group_masses(view, among=kept).masked_fill_(~kept, -torch.inf)

    def _of_head(self, view: View, kv_head: int) -> Swap:
        """Its rows of a projection are the head's own."""
        if self.pairs is None:
            return dataclasses.replace(self, heads="all")
        width = view.keys.shape[3]
        rows = slice(kv_head * width, (kv_head + 1) * width)
        pairs = [(key[rows], query[rows]) for key, query in self.pairs]
        return dataclasses.replace(self, pairs=pairs, heads="all")

    def _group_products(self, view: View) -> torch.Tensor:
        return self.frame.group(self.token_scores(view))

    def _group_masses(
        self, view: View, columns: int | None = None, among: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[batch, 1, n, groups]``: what each head's softmax gives, joined over heads.

        Parameters
        ----------
        columns
            The first so many alone; None: all.
        among
            As the result, bool: the groups that a softmax is over; None: all.
        """
        key, query = self._pair(view)
        document, own = (rows[..., :columns] for rows in self._summaries(view, key))
        look = self._look(view)
        parts = query.unflatten(0, (view.kv_heads, -1))
        has_kept = self.score.endswith("kept")
        always = self.frame.always(view)
        hidden = ~view.causal() if has_kept else ~self._choosable_columns(view)
        if among is not None:
            hidden = hidden | ~self._spread(among[:, 0], view)
        joined: torch.Tensor | None = None
        for head in range(look.shape[1]):
            low = look[:, head].float() @ parts[head // view.repeats] * view.scale
            if self.summary_dtype in SUMMARY_LEVELS:
                low = kept_rows(low.flatten(0, -2), "int8").view_as(
                    low
                )  # as a query meets such rows
            logits = view.products(low[..., :columns], document, own)
            if has_kept:
                _put_exact(logits, view, look[:, head], head // view.repeats, always)
            logits = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
            mass = self.frame.group(logits.nan_to_num_(0.0), "sum")
            if joined is None:
                joined = mass
            elif not self.score.startswith("max"):
                joined += mass
            else:
                torch.maximum(joined, mass, out=joined)
        return joined[:, None]

    def _summaries(self, view: View, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the document, made once, and of the samples' own tokens."""
        document = view.past.once("summary", lambda: self._rows(flat_past(view.past), key, view))
        own = self._rows(flat_tokens(view.keys), key, view)
        return document, own.unflatten(0, (view.batch, view.rows))

    def _look(self, view: View) -> torch.Tensor:
        """The query that chooses."""
        if view.layer not in self.true_query and view.predicted is not None:
            return view.predicted
        return view.query

    def token_scores(self, view: View) -> torch.Tensor:
        """``[batch, 1, n, columns]`` fp32."""
        key, query = self._pair(view)
        document, own = self._summaries(view, key)
        look = self._look(view)
        if self.score == "sum":
            low = sum_over_heads(look, view.kv_heads) @ query
            low = low.unflatten(0, (view.batch, view.rows))
            return view.products(low, document, own)[:, None]
        return self._scores_by_head(view, look, query, document, own)

    def _scores_by_head(self, view: View, look, query, document, own) -> torch.Tensor:
        # A head's query meets the rows of the matrix that belong to its KV head.
        parts = query.unflatten(0, (view.kv_heads, -1))
        hidden = ~self._choosable_columns(view)
        total: torch.Tensor | None = None
        for head in range(look.shape[1]):
            kv_head = head // view.repeats
            low = look[:, head].float() @ parts[kv_head] * view.scale
            scores = view.products(low, document, own)
            if self.score == "softmax":
                scores = scores.masked_fill_(hidden, -torch.inf).softmax(-1).nan_to_num_(0.0)
            if total is None:
                total = scores
            else:
                total = torch.maximum(total, scores) if self.score == "max" else total.add_(scores)
        return total[:, None]

    def _choosable_columns(self, view: View) -> torch.Tensor:
        return self._spread(self.frame.choosable(view), view)

    def _spread(self, groups: torch.Tensor, view: View) -> torch.Tensor:
        """Groups ``[..., groups]`` as columns ``[..., columns]``, bool."""
        spread = groups.repeat_interleave(self.frame.group_tokens, -1)
        return torch.nn.functional.pad(spread, (0, view.columns - spread.shape[-1]))

    def _pair(self, view: View) -> Pair:
        rank = self.ranks[view.layer]
        if self.pairs is not None:
            return tuple(self._kept(matrix[:, :rank]) for matrix in self.pairs[view.layer])
        past = view.past
        key, query = (
            past.once(f"projection {i}", lambda i=i: self._kept(self._estimate(past, rank)[i]))
            for i in (0, 1)
        )
        return key, query

    def _kept(self, projection: torch.Tensor) -> torch.Tensor:
        """bf16 beside int4 rows."""
        return projection.bfloat16().float() if self.summary_dtype == "int4" else projection

    def _estimate(self, past: LayerPast, rank: int) -> Pair:
        """What the cache makes of a prompt's first chunk when nobody calibrated."""
        first = past.keys[: past.first_query.shape[2]].transpose(0, 1)[None]
        score = "sum" if self.score == "sum" else "mass"
        kind, rotary = self.projection_kind, self.rotary
        return from_chunk(kind, first, past.first_query, rank, score=score, rotary=rotary)

    def _rows(self, keys: torch.Tensor, key: torch.Tensor, view: View) -> torch.Tensor:
        """[tokens, width] -> [tokens, rank] fp32, as the summary keeps them."""
        rows = keys.float() @ key
        if self.summary_dtype in SUMMARY_LEVELS:
            return kept_rows(rows, self.summary_dtype)
        return rows.to(view.keys.dtype).float()


def _put_exact(logits, view: View, query, kv_head: int, always: torch.Tensor) -> None:
    """Exact products in the columns that are in memory anyway.

    Parameters
    ----------
    logits
        ``[batch, n, columns]``, changed in place.
    query
        ``[batch, n, head_dim]`` of one head.
    always
        ``[n, columns]`` bool.
    """
    columns, tokens = always.any(0).nonzero().flatten(), view.past.tokens
    of_document, of_own = columns[columns < tokens], columns[columns >= tokens] - tokens
    query = query.float() * view.scale
    exact = torch.cat(
        [
            query @ view.past.keys[of_document, kv_head].float().T,
            query @ view.keys[:, kv_head, of_own].float().transpose(1, 2),
        ],
        -1,
    )
    logits[..., columns] = torch.where(always[:, columns], exact, logits[..., columns])


def flat_past(past: LayerPast) -> torch.Tensor:
    """``[tokens, kv_heads * head_dim]``."""
    return past.keys.flatten(1)
