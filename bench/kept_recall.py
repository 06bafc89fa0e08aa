"""What PRKV's mix holds of the attention: tokens that stay, and pages that are chosen step by step.

    python -m bench.kept_recall --model build/models/smollm2 --out kept_recall_smollm2

A text's prompt is read and goes on, teacher-forced with the full cache, so that every setting meets
the same keys and queries. Of k tokens a share S stays by what the newest 64 queries paid them,
chosen anew after every 128 steps (PRKV 3.4, algorithm 1); the others are pages of 32 tokens that a
step chooses by their boxes; the newest 64 tokens are attended too. Each KV head for itself, as
preset ``prkv``. Measured is the share of attention (PRKV's recall) that is held in the first and in
the last interval.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import machine
from bench.quality.emulate import Emulation
from bench.quality.harness import REFERENCE
from bench.quality.others import Full
from bench.quality.text import HELD_OUT, Texts
from bench.quality.view import LayerPast, View
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.methods.observed import agreement, by_mass

PAGE, LOCAL, WINDOW, INTERVAL = 32, 64, 64, 128  # tokens; queries; steps: PRKV 5.1
STRETCH = 512  # tokens that follow at once
CHARACTERS_PER_TOKEN = 8
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, None)  # None: by the prompt (PRKV G)
TOKENS = (256, 512, 1024, 2048)


@dataclasses.dataclass
class Mix:
    """One setting on one KV head."""

    tokens: int  # k
    share: float
    kept: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0).long())
    held: list[float] = dataclasses.field(default_factory=list)  # in each interval

    @property
    def pages(self) -> int:
        return round((1 - self.share) * self.tokens) // PAGE

    def choose_kept(self, paid: torch.Tensor) -> None:
        """`paid`: ``[sealed tokens]``."""
        may_stay = torch.ones_like(paid, dtype=torch.bool)
        self.kept = by_mass(paid, may_stay, 1)[: round(self.share * self.tokens)]

    def attended(self, bounds: torch.Tensor, sealed: torch.Tensor, columns: int) -> torch.Tensor:
        """What each step attends, ``[steps, columns]`` bool.

        bounds: ``[steps, pages]``; sealed: ``[steps]``, tokens that have left the newest.
        """
        mask = torch.arange(columns) >= sealed[:, None]
        mask[:, self.kept] = True
        pages = bounds.shape[1]
        is_kept = torch.zeros(pages * PAGE, dtype=torch.bool)
        is_kept[self.kept] = True
        whole = is_kept.view(pages, PAGE).all(1)
        may_be = (torch.arange(pages) < sealed[:, None] // PAGE) & ~whole
        count = min(self.pages, pages)
        best = bounds.masked_fill(~may_be, -torch.inf).topk(count, dim=1)
        chosen = torch.zeros_like(may_be).scatter(1, best.indices, best.values > -torch.inf)
        mask[:, : pages * PAGE] |= chosen.repeat_interleave(PAGE, 1)
        return mask


class HeadRun:
    """One KV head of one layer, under every mix.

    Parameters
    ----------
    keys
        ``[tokens, head_dim]``.
    query
        ``[heads, WINDOW + decoded, head_dim]``: the prompt's newest, and what is decoded.
    """

    def __init__(self, keys: torch.Tensor, query: torch.Tensor, scale: float):
        self.keys, self.query, self.scale = keys.float(), query.float(), scale
        self.prompt = len(keys) - (query.shape[1] - WINDOW)

    def weights(self, first: int, count: int) -> torch.Tensor:
        """Of the queries at columns `first` on: ``[heads, count, first + count]``."""
        at = first - self.prompt + WINDOW
        scores = self.query[:, at : at + count] @ self.keys[: first + count].T * self.scale
        later = torch.arange(first + count) > torch.arange(first, first + count)[:, None]
        return scores.masked_fill(later, -torch.inf).softmax(-1)

    def agreed(self, tokens: int) -> float:
        """PRKV (4), in the mean over this KV head's query heads."""
        window = self.weights(self.prompt - WINDOW, WINDOW)
        return agreement(window[:, :, : self.prompt - WINDOW], tokens)

    def start(self, mixes: list[Mix]) -> None:
        window = self.weights(self.prompt - WINDOW, WINDOW).sum(1).mean(0)
        for mix in mixes:
            mix.choose_kept(window[: _sealed(self.prompt)])

    def follow(self, mixes: list[Mix], is_exact: bool) -> None:
        """All intervals; each ends with a choice by what was attended, or exactly by all."""
        for first in range(self.prompt, len(self.keys), INTERVAL):
            is_measured = first in (self.prompt, len(self.keys) - INTERVAL)
            begin = first if is_measured else first + INTERVAL - WINDOW
            count = first + INTERVAL - begin
            weights = self.weights(begin, count)
            sealed = torch.tensor([_sealed(begin + step) for step in range(count)])
            bounds = self._bounds(begin, count, int(sealed[-1]) // PAGE)
            newest = weights[:, -WINDOW:]
            for mix in mixes:
                mask = mix.attended(bounds, sealed, begin + count)
                held = weights * mask
                share = held.sum(-1, keepdim=True)
                if is_measured:
                    mix.held.append(share.mean().item())
                paid = newest if is_exact else held[:, -WINDOW:] / share[:, -WINDOW:]
                mix.choose_kept(paid.sum(1).mean(0)[: _sealed(begin + count)])

    def _bounds(self, first: int, count: int, pages: int) -> torch.Tensor:
        """No product with a key of a page is larger, summed over heads: ``[count, pages]``."""
        of_pages = self.keys[: pages * PAGE].unflatten(0, (pages, PAGE))
        least, most = of_pages.amin(1), of_pages.amax(1)
        at = first - self.prompt + WINDOW
        query = self.query[:, at : at + count]
        centre, radius = (most + least) / 2, (most - least) / 2
        return query.sum(0) @ centre.T + query.abs().sum(0) @ radius.T


def _sealed(columns: int) -> int:
    return max(0, columns - LOCAL) // PAGE * PAGE


def read(model: Any, ids: torch.Tensor, prompt: int) -> list[tuple[Any, Any, float]]:
    """Of each layer keys ``[tokens, kv_heads, head_dim]``, queries ``[heads, WINDOW + decoded,
    head_dim]`` and the scale."""
    with Emulation(model) as emulation:
        past = emulation.read(ids[:prompt])
        queries = [[layer.last_query[0, :, -WINDOW:]] for layer in past.layers]
        scales = [0.0] * len(queries)
        for stretch in ids[prompt:].split(STRETCH):
            views: dict[int, View] = {}

            def note(view: View, mask: Any, views: dict[int, View] = views) -> None:
                views[view.layer] = view

            emulation.follow(past, stretch[None], Full(), note, 1)
            for number, layer in enumerate(past.layers):
                view = views[number]
                queries[number].append(view.query[0])
                scales[number] = view.scale
                own = (view.keys[0].transpose(0, 1), view.values[0].transpose(0, 1))
                keys, values = torch.cat([layer.keys, own[0]]), torch.cat([layer.values, own[1]])
                past.layers[number] = LayerPast(keys, values, layer.first_query, layer.last_query)
    return [
        (layer.keys, torch.cat(queries[number], 1), scales[number])
        for number, layer in enumerate(past.layers)
    ]


def mixes_of(runs: list[HeadRun]) -> list[list[Mix]]:
    """Of each KV head of a layer; by the prompt all heads keep as many, at most three quarters."""
    of_heads: list[list[Mix]] = [[] for _ in runs]
    for tokens in TOKENS:
        agreed = sum(run.agreed(tokens) for run in runs) / len(runs)
        kept = min(int(agreed) // PAGE, tokens * 3 // 4 // PAGE) * PAGE
        for share in SHARES:
            for mixes in of_heads:
                mixes.append(Mix(tokens, kept / tokens if share is None else share))
    return of_heads


def measure(layers: list[tuple[Any, Any, float]], is_exact: bool) -> list[dict[str, Any]]:
    """One a mix: what is held, in the mean over layers and heads."""
    found: list[list[Mix]] = []
    for number, (keys, queries, scale) in enumerate(layers):
        repeats = queries.shape[0] // keys.shape[1]
        runs = [
            HeadRun(keys[:, head], queries[head * repeats : (head + 1) * repeats], scale)
            for head in range(keys.shape[1])
        ]
        for run, mixes in zip(runs, mixes_of(runs), strict=True):
            run.start(mixes)
            run.follow(mixes, is_exact)
            found.append(mixes)
        print(f"layer {number + 1} of {len(layers)}", file=sys.stderr)
    rows = []
    asked = [(tokens, share) for tokens in TOKENS for share in SHARES]
    for (tokens, share), of_mix in zip(asked, zip(*found, strict=True), strict=True):
        rows.append(
            {
                "tokens": tokens,
                "share": share,
                "kept": round(sum(mix.share for mix in of_mix) / len(of_mix), 3),
                "first": round(sum(mix.held[0] for mix in of_mix) / len(of_mix), 4),
                "last": round(sum(mix.held[-1] for mix in of_mix) / len(of_mix), 4),
            }
        )
    return rows


COLUMNS = ("tokens", "*S* = 0", "0.25", "0.5", "0.75", "1", "by the prompt")


def lines(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each number of tokens: what is held at first, and at the end."""
    told = []
    for tokens in TOKENS:
        rows = [row for row in results["rows"] if row["tokens"] == tokens]
        cells = [f"{row['first']:.3f}, {row['last']:.3f}" for row in rows]
        cells[-1] += f" (*S* {rows[-1]['kept']:.2f})"
        told.append((f"{tokens:,}", *cells))
    return told


def main(
    model: Annotated[Path, typer.Option(help="folder of a Hugging Face model")] = REFERENCE,
    prompt: Annotated[int, typer.Option(help="tokens that are read at once")] = 8192,
    decoded: Annotated[int, typer.Option(help="tokens that follow; a multiple of 128")] = 2048,
    scores: Annotated[str, typer.Option(help="while decoding: attended, or all of disk")] = (
        "attended"
    ),
    seed: Annotated[int, typer.Option(help="of the text's place")] = 0,
    threads: Annotated[int, typer.Option(help="of torch; 0: one for each core")] = 1,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    """What PRKV's mix holds of the attention, by k and S."""
    import numpy as np

    if scores not in ("attended", "disk"):
        raise typer.BadParameter(f"scores: must be attended or disk, got {scores!r}")
    if decoded < 2 * INTERVAL or decoded % INTERVAL:
        raise typer.BadParameter(f"decoded: must be 256, 384, 512 ..., got {decoded}")
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    loaded = load_model(str(model))
    tokenizer = load_tokenizer(str(model))
    rng = np.random.default_rng(seed)
    text = Texts(HELD_OUT).draw(rng, CHARACTERS_PER_TOKEN * (prompt + decoded))
    ids = torch.tensor(tokenizer(text).input_ids[: prompt + decoded])
    with torch.inference_mode():
        rows = measure(read(loaded, ids, prompt), scores == "disk")
    for row in rows:
        print(row)
    if out:
        facts = machine.describe(Path("."))
        facts["command"] = shlex.join(["python", "-m", "bench.kept_recall", *sys.argv[1:]])
        results = {"machine": facts, "model": model.name, "prompt": prompt, "decoded": decoded}
        results |= {"scores": scores, "seed": seed, "rows": rows}
        print(f"wrote {machine.write(out, results)}")


if __name__ == "__main__":
    typer.run(main)
