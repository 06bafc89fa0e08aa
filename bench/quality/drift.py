"""Do clusters stay good while a text goes on? A prompt of 1K tokens, 15K more, three updates.

    python -m bench.quality.drift

The model reads a held-out text teacher-forced with the full cache, so that all updates meet the
same keys and queries. Each has its own clusters: of the prompt, and then of what leaves the tail.
Measured are the variance within clusters and the attention mass that a choice holds.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import machine
from bench.quality.choosing import Frame
from bench.quality.cluster_bytes import cluster_pages
from bench.quality.cluster_updates import UPDATES, Row, clusters_of
from bench.quality.clusters import ClusterSettings, choose_clusters
from bench.quality.emulate import Emulation, Past
from bench.quality.harness import REFERENCE, load_config
from bench.quality.others import Full
from bench.quality.text import HELD_OUT, Texts
from bench.quality.view import LayerPast, View
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.methods.clusters import ClusterOptions
from kvswap_torch.methods.k_means import mean_variance

STRETCH = 512  # tokens that follow at once
MEASURED_EVERY = 32  # steps
END = 1024  # tokens at the end, over which recall is averaged
CHARACTERS_PER_TOKEN = 8


@dataclass
class Drift:
    """One layer's row under one update: its clusters, and what was measured on the way."""

    row: Row
    recall: list[tuple[int, float]] = field(default_factory=list)  # position, over heads
    attended: list[int] = field(default_factory=list)  # tokens, where recall was measured

    def note(self, position: int, columns: torch.Tensor, mass: torch.Tensor) -> None:
        """What a step attends, ``[tokens]`` bool, beside its attention ``[heads, columns]``."""
        columns = columns[: mass.shape[1]]
        self.recall.append((position, float((mass * columns).sum(1).mean())))
        self.attended.append(int(columns[: position + 1].sum()))

    def as_dict(self, keys: torch.Tensor, end: int) -> dict[str, Any]:
        """After the last token; `keys` ``[tokens, width]``."""
        members = [self.row.members(cluster) for cluster in range(self.row.count)]
        sizes = torch.tensor([len(each) for each in members]).float()
        variance = torch.stack([mean_variance(keys[each])[1] for each in members])
        late = [recall for position, recall in self.recall if position >= end - END]
        attended = self.attended[-len(late) :]
        return {
            "variance": round(float((sizes * variance).sum() / sizes.sum()), 3),
            "variance_of_clusters": round(float(variance.mean()), 3),
            "recall_at_end": round(sum(late) / len(late), 4),
            "attended_at_end": round(sum(attended) / len(attended), 1),
            "recall": [[position, round(recall, 4)] for position, recall in self.recall],
            "clusters": self.row.count,
            "tokens_of_cluster": round(float(sizes.mean()), 1),
            "largest": int(sizes.max()),
            "pending": self.row.pending,
            "splits": self.row.splits,
            "refused": self.row.refused,
            "forced": self.row.forced,
        }


class LayerRow:
    """One layer's row of clusters, by every update: the whole layer, or a KV head of it."""

    def __init__(self, settings: ClusterSettings, frame: Frame, tokens: int, head: int | None):
        self._settings, self._frame = settings, frame
        self._tokens, self._head = tokens, head
        self.keys = torch.zeros(0)
        self.drifts: dict[str, Drift] = {}

    def follow(self, view: View) -> None:
        """The next stretch."""
        if self._head is not None:
            view = view.of_head(self._head)
        own = view.keys[0].transpose(0, 1)
        self.keys = torch.cat([view.past.keys, own]).flatten(1).float()
        positions = torch.cat([view.positions(), torch.tensor([view.columns])])
        group, tail = self._frame.group_tokens, self._frame.tail_tokens
        left = ((positions - tail).clamp_min(0) // group * group).tolist()  # one step more
        masses = self._masses(view)
        for update in UPDATES:
            if update not in self.drifts:
                self.drifts[update] = Drift(self._start(update, left[0]))
            self._follow_update(view, update, left, masses)

    def _start(self, update: str, left: int) -> Row:
        width = self.keys.shape[1]
        row = clusters_of(update, width, self._tokens, self._settings.options)
        row.enter_prompt(self.keys, left)
        return row

    def _masses(self, view: View) -> dict[int, torch.Tensor]:
        """Of every measured step each head's attention: ``[heads, columns]``."""
        steps = torch.arange(0, view.rows, MEASURED_EVERY)
        masses = torch.stack([mass for _, mass in view.masses(steps)], 1)
        return dict(zip(steps.tolist(), masses, strict=True))

    def _follow_update(self, view: View, update: str, left: list[int], masses) -> None:
        """Tokens leave the tail at the end of a step, after it has read."""
        drift, row = self.drifts[update], self.drifts[update].row
        for step in range(view.rows):
            changes, read = left[step + 1] > left[step] or row.pending > 0, set()
            if step in masses or (changes and update == "adaptive"):
                query = view.query[0, :, step].float()
                chosen = choose_clusters(row, query, view.kv_heads, self._settings, view.scale)
                read = set(chosen.clusters.tolist())
                if step in masses:
                    drift.note(view.past.tokens + step, chosen.columns, masses[step])
            if changes:
                row.enter(self.keys, left[step + 1], read)


def _extended(past: Past, views: dict[int, View]) -> Past:
    """The past with a stretch behind it."""
    layers = []
    for number, layer in enumerate(past.layers):
        own = [t[0].transpose(0, 1) for t in (views[number].keys, views[number].values)]
        keys, values = (
            torch.cat(pair) for pair in zip((layer.keys, layer.values), own, strict=True)
        )
        layers.append(LayerPast(keys, values, layer.first_query, layer.last_query))
    return Past(layers)


def drift(
    model: Any, ids: torch.Tensor, prompt: int, settings: ClusterSettings, frame: Frame
) -> dict[str, list[dict[str, Any]]]:
    """By update: what was measured of each layer and row.

    Parameters
    ----------
    ids
        ``[tokens]``, of which the first `prompt` are read at once.
    """
    with Emulation(model) as emulation:
        shape = emulation.parts.shape
        heads = range(shape.kv_heads) if settings.heads == "each" else (None,)
        rows = [
            [LayerRow(settings, frame, len(ids), head) for head in heads]
            for _ in range(shape.layers)
        ]
        past = emulation.read(ids[:prompt])
        for stretch in ids[prompt:].split(STRETCH):
            views: dict[int, View] = {}

            def follow(view: View, mask: Any, views: dict[int, View] = views) -> None:
                views[view.layer] = view
                for row in rows[view.layer]:
                    row.follow(view)

            emulation.follow(past, stretch[None], Full(), follow, 1)
            past = _extended(past, views)
    return {
        update: [row.drifts[update].as_dict(row.keys, len(ids)) for layer in rows for row in layer]
        for update in UPDATES
    }


def by_thousand(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Recall over layers and rows, by where in the text: ``[position, mean of 1,024]``."""
    blocks: dict[int, list[float]] = {}
    for row in rows:
        for position, recall in row["recall"]:
            blocks.setdefault(position // END * END, []).append(recall)
    return [[first, round(sum(found) / len(found), 4)] for first, found in blocks.items()]


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over layers and rows."""
    names = [name for name in rows[0] if name != "recall"]
    return {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in names}


def main(
    model: Annotated[Path, typer.Option(help="folder of a Hugging Face model")] = REFERENCE,
    prompt: Annotated[int, typer.Option(help="tokens that are clustered at once")] = 1024,
    tokens: Annotated[int, typer.Option(help="in all")] = 16384,
    cluster_tokens: Annotated[int, typer.Option(help="that k-means aims at")] = 32,
    heads: Annotated[
        str, typer.Option(help="all KV heads share clusters, or each its own")
    ] = "all",
    score: Annotated[str, typer.Option(help="sum, max or mass")] = "sum",
    attend: Annotated[int, typer.Option(help="tokens chosen at most")] = 400,
    seed: Annotated[int, typer.Option(help="of the text's place")] = 0,
    threads: Annotated[int, typer.Option(help="of torch; 0: one for each core")] = 1,
    out: Annotated[str, typer.Option(help="name of the results; none: write none")] = "drift",
) -> None:
    """Variance within clusters and recall while a text goes on, by three updates."""
    import numpy as np

    if heads not in ("all", "each"):
        raise typer.BadParameter(f"heads: must be all or each, got {heads!r}")
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    loaded = load_model(str(model))
    tokenizer = load_tokenizer(str(model))
    text = Texts(HELD_OUT).draw(np.random.default_rng(seed), CHARACTERS_PER_TOKEN * tokens)
    ids = torch.tensor(tokenizer(text).input_ids[:tokens])
    config = load_config(model)
    frame = Frame(config.group_tokens, 0, config.sink_tokens, config.tail_tokens)
    sinks = -(-frame.sink_tokens // frame.group_tokens) * frame.group_tokens
    options = ClusterOptions(cluster_tokens, 2 * cluster_tokens, sink_tokens=sinks)
    from kvswap_torch.hf.families import model_parts

    pages = cluster_pages(model_parts(loaded).shape, heads)
    settings = ClusterSettings(options, heads, "adaptive", score, attend, tokens, pages.page_tokens)
    found = drift(loaded, ids, prompt, settings, frame)
    told = {update: means(rows) for update, rows in found.items()}
    for update, row in told.items():
        print(update, row)
    if out != "none":
        asked = {"model": model.name, "prompt": prompt, "tokens": len(ids), "seed": seed}
        asked |= {"cluster_tokens": cluster_tokens, "heads": heads, "score": score}
        asked |= {"attend": attend}
        facts = machine.describe(Path("."))
        facts["command"] = shlex.join(["python", "-m", "bench.quality.drift", *sys.argv[1:]])
        recall = {update: by_thousand(rows) for update, rows in found.items()}
        for row in (row for rows in found.values() for row in rows):
            del row["recall"]
        results = {"machine": facts, "asked": asked, "mean": told, "recall": recall, "rows": found}
        print(f"wrote {machine.write(out, results)}")


if __name__ == "__main__":
    typer.run(main)
