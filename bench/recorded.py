"""Recorded choices: which groups a model selects step by step, and which its predictions would.

``python -m bench recorded MODEL`` records them; `Recorded.load` scales them to another shape, and
`Recorded.follow` makes a cache select, and prefetch, in their way. The cache's own selection runs
all the same, so that its time is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

FOLDER = Path("bench/choices")
GROUP_TOKENS = 4
TAIL_TOKENS = 32
TEXT = Path("examples/reference_model/documents/python_logging.txt")


@dataclass(frozen=True)
class Recorded:
    """Of one model and text.

    Parameters
    ----------
    chosen, predicted
        ``[layers, steps, groups]`` int32, a row rising: by the layer's own query, and by that
        predicted from the layer before, of the first layer its own.
    candidates
        Groups that there were to choose from at the first step.
    """

    chosen: np.ndarray
    predicted: np.ndarray
    candidates: int

    @classmethod
    def load(cls, name: str, folder: Path = FOLDER) -> Recorded:
        """A recording of this repository: `smollm2` or `reference_model`."""
        with np.load(folder / f"{name}.npz") as file:
            return cls(file["chosen"], file["predicted"], int(file["candidates"]))

    def save(self, name: str, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            folder / f"{name}.npz",
            chosen=self.chosen,
            predicted=self.predicted,
            candidates=np.int64(self.candidates),
        )

    @property
    def steps(self) -> int:
        return self.chosen.shape[1]

    def hit_share(self) -> float:
        """Of what is chosen, what was predicted or chosen before; without the first layer."""
        hits = [
            np.isin(now, np.union1d(ahead, before)).mean()
            for chosen, predicted in zip(self.chosen[1:], self.predicted[1:], strict=True)
            for before, now, ahead in zip(chosen, chosen[1:], predicted[1:], strict=False)
        ]
        return float(np.mean(hits))

    def scaled(self, layers: int, groups: int, wanted: int, seed: int = 1) -> Recorded:
        """For another shape: `layers` of these, evenly, `wanted` of `groups` groups.

        Every recorded group becomes one of `groups`, always the same and no other's, about where
        it stood in the text: what is selected again, and what is predicted, stays so. Of fewer
        wanted than recorded some groups are left out, the same in every step; of more, each group
        has neighbours.
        """
        draw = np.random.default_rng(seed)
        picked = np.linspace(0, len(self.chosen) - 1, layers).round().astype(int)
        copies = -(-wanted // self.chosen.shape[2])
        most = max(int(self.chosen.max()), int(self.predicted.max())) + 1
        if most * copies > groups:
            raise ValueError(
                f"recorded: a context must have at least {most * copies} groups for {wanted} "
                f"recorded ones of {most}, got {groups}"
            )
        places = np.sort(draw.choice(groups, most * copies, replace=False)).reshape(most, copies)
        kept = wanted / (copies * self.chosen.shape[2])
        order = draw.permuted(np.arange(most * copies)).reshape(most, copies)

        def moved(rows: np.ndarray) -> np.ndarray:
            count = round(kept * copies * rows.shape[-1])
            each = (_first(places[row].ravel(), order[row].ravel(), count) for row in rows)
            return np.stack(list(each))

        chosen, predicted = (
            np.stack([moved(each[layer]) for layer in picked])
            for each in (self.chosen, self.predicted)
        )
        return Recorded(chosen, predicted, groups)

    def follow(self, session: Any, batch: int) -> Callable[[int], None]:
        """Gives `session` the choices of a step; a sequence is three steps ahead of the last."""

        def give(step: int) -> None:
            for layer, (chosen, predicted) in enumerate(
                zip(self.chosen, self.predicted, strict=True)
            ):
                at = [(step + 3 * sequence) % self.steps for sequence in range(batch)]
                own, ahead = ([rows[i].tolist() for i in at] for rows in (chosen, predicted))
                session.override_selection(layer, own, ahead)

        return give


def _first(groups: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    return np.sort(groups[np.argsort(order, kind="stable")[:count]]).astype(np.int32)


@torch.inference_mode()
def record(model: Any, ids: torch.Tensor, steps: int, groups: int) -> Recorded:
    """Teacher-forced over the last `steps` tokens of `ids` ``[1, tokens]``, by exact keys and mass.

    A prediction is made and scored as by a cache that verifies it, one query a KV head.
    """
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.lookahead import LookAhead, captured_query

    parts = model_parts(model)
    ahead = LookAhead(parts, kv_memory_bytes=1)
    calls: dict[int, dict[str, Any]] = {}

    residuals: dict[int, torch.Tensor] = {}

    def keep_residual(index: int) -> Callable[..., None]:
        return lambda module, args: residuals.update({index: args[0]})

    def keep(index: int) -> Callable[..., None]:
        return lambda module, args, kwargs: calls.update({index: dict(kwargs)})

    handles = [
        parts.mixers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in parts.disk
    ]
    handles += [
        norm.register_forward_pre_hook(keep_residual(i))
        for i, norm in ahead.after_attention.items()
    ]
    try:
        past = model(ids, use_cache=True).past_key_values
    finally:
        for handle in handles:
            handle.remove()
    chosen, predicted = [], []
    tokens = ids.shape[1]
    for number, index in enumerate(parts.disk):
        call = calls[index]
        keys = past.layers[index].keys[0].float()
        hidden = call["hidden_states"]
        query = ahead.predict(index, index, hidden, call)
        if query is None:
            query = captured_query(parts.mixers[index], hidden, call["position_embeddings"], call)
        before = parts.disk[max(0, number - 1)]
        if index > 0 and before in residuals:
            guess = ahead.predict_after_attention(index, residuals[before], calls[before])
        else:
            guess = ahead.predict(index, before, calls[before]["hidden_states"], call)
        heads, kv_heads = query.shape[1], keys.shape[0]
        mean = guess[0].float().unflatten(0, (kv_heads, heads // kv_heads)).mean(1)
        rows = [
            (_best(query[0, :, t].float(), keys, t, groups), _best(mean[:, t], keys, t, groups))
            for t in range(tokens - steps, tokens)
        ]
        chosen.append(np.stack([own for own, _ in rows]))
        predicted.append(np.stack([other for _, other in rows]))
    sealed = (tokens - steps - TAIL_TOKENS) // GROUP_TOKENS
    return Recorded(np.stack(chosen), np.stack(predicted), sealed)


def _best(query: torch.Tensor, keys: torch.Tensor, position: int, groups: int) -> np.ndarray:
    """query ``[heads, dim]``, keys ``[kv_heads, tokens, dim]``: rising groups with most mass."""
    count = (position - TAIL_TOKENS) // GROUP_TOKENS * GROUP_TOKENS
    seen = keys[:, GROUP_TOKENS:count].repeat_interleave(len(query) // len(keys), 0)  # no sinks
    scores = torch.einsum("hd,htd->ht", query, seen) * query.shape[-1] ** -0.5
    mass = scores.softmax(-1).sum(0).unflatten(0, (-1, GROUP_TOKENS)).sum(-1)
    return 1 + mass.topk(groups).indices.sort().values.numpy().astype(np.int32)


def main(
    model: Annotated[Path, typer.Argument(help="a model's folder")],
    name: Annotated[str, typer.Option(help="of the recording")] = "smollm2",
    tokens: Annotated[int, typer.Option(help="of the text, the steps included")] = 4096,
    steps: Annotated[int, typer.Option(help="decoded")] = 64,
    groups: Annotated[int, typer.Option(help="selected in a step")] = 100,
    text: Annotated[Path, typer.Option(help="what is read")] = TEXT,
    out: Annotated[Path, typer.Option(help="folder of recordings")] = FOLDER,
) -> None:
    """Records which groups a model selects, and which its predictions would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :tokens]
    recorded = record(loaded, ids, steps, groups)
    recorded.save(name, out)
    facts = {"layers": len(recorded.chosen), "steps": steps, "candidates": recorded.candidates}
    print(json.dumps(facts | {"predicted or chosen before": round(recorded.hit_share(), 3)}))


if __name__ == "__main__":
    typer.run(main)
