"""How clusters of similar keys are retrieved and changed step by step (DynaKV, fig. 12, table 2).

    python -m bench cluster_steps --model build/models/smollm2

A model reads a held-out text with the full cache. In each layer the engine's own clusters take in
its keys, and each step retrieves the best clusters by its query, as preset ``dynakv`` does. Told
are, over layers and steps:

- *strict order*: tokens that one read finds where the retrieved tokens stand in the order of the
  text, and *in clusters*, where each cluster is one read;
- *updated*: the share of clusters, which a token joined or which were split, that one of the next
  1, 2, 4, 8 and 16 steps retrieves, and *any*: that share of all clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench import machine
from bench.long_decode import text_of
from bench.quality.harness import REFERENCE
from kvswap_torch import _C
from kvswap_torch.cli.load import load_model
from kvswap_torch.tuning.observe import Calibrator, Observed
from kvswap_torch.tuning.samples import Sample

WITHIN = (1, 2, 4, 8, 16)  # steps
PAGE_TOKENS, SINK_TOKENS, TAIL_TOKENS, BLOCK_TOKENS = 8, 8, 32, 2048


def runs(tokens: torch.Tensor) -> int:
    """Stretches of neighbours among tokens, ``[tokens]``, rising."""
    return int((tokens.diff() != 1).sum()) + 1 if len(tokens) else 0


def retrieved_within(
    retrieved: Sequence[set[int]], asked: Sequence[Iterable[int]], steps: int, last: int
) -> tuple[int, int]:
    """How many that are asked for at a step one of the next `steps` retrieves, and how many are.

    Steps that fewer than `last` follow are left out.
    """
    hits = count = 0
    for step in range(len(retrieved) - last):
        soon = set().union(*retrieved[step + 1 : step + 1 + steps])
        wanted = set(asked[step])
        hits, count = hits + len(wanted & soon), count + len(wanted)
    return hits, count


@dataclass
class Walk:
    """What one layer's clusters do while a text goes on.

    Parameters
    ----------
    pages
        That a step retrieves at most.
    retrieved, updated, there_are
        Of each step: clusters retrieved, clusters changed after it, and how many there are.
    tokens, reads_in_order
        Retrieved in all, and the reads that these take where they stand in the order of the text.
    """

    pages: int
    retrieved: list[set[int]] = field(default_factory=list)
    updated: list[set[int]] = field(default_factory=list)
    there_are: list[int] = field(default_factory=list)
    tokens: int = 0
    reads_in_order: int = 0

    def follow(self, row: Any, keys: torch.Tensor, queries: torch.Tensor, first: int) -> None:
        """A step for each query ``[steps, width]``, the first at position `first`."""
        place = row.place.long()
        for step, query in enumerate(queries):
            chosen = self._choose(row, query)
            numbers = torch.tensor(sorted(chosen), dtype=torch.int64)
            mine = torch.isin(place, numbers).nonzero().flatten()
            self.tokens += len(mine)
            self.reads_in_order += runs(mine)
            left = (first + step + 1 - TAIL_TOKENS) // PAGE_TOKENS * PAGE_TOKENS
            row.enter(keys, left, numbers.tolist())
            before, place = place, row.place.long()
            moved = place[(place != before) & (place >= 0)]
            self.retrieved.append(chosen)
            self.updated.append(set(moved.tolist()))
            self.there_are.append(row.count)

    def _choose(self, row: Any, query: torch.Tensor) -> set[int]:
        score = row.centroid[: row.count].float() @ query
        needed = -(-row.size[: row.count].long() // PAGE_TOKENS)
        chosen: set[int] = set()
        left = self.pages
        for cluster in score.argsort(descending=True, stable=True).tolist():
            if needed[cluster] > left:
                break
            left -= int(needed[cluster])
            chosen.add(cluster)
        return chosen


def told(walks: Sequence[Walk]) -> dict[str, Any]:
    """Over layers and steps."""
    tokens = sum(walk.tokens for walk in walks)
    clusters = sum(len(chosen) for walk in walks for chosen in walk.retrieved)
    soon = {}
    for steps in WITHIN:
        shares = []
        for name in ("updated", "there_are"):
            asked = [
                getattr(walk, name) if name == "updated" else list(map(range, walk.there_are))
                for walk in walks
            ]
            found = [
                retrieved_within(walk.retrieved, wanted, steps, WITHIN[-1])
                for walk, wanted in zip(walks, asked, strict=True)
            ]
            hits, count = (sum(each) for each in zip(*found, strict=True))
            shares.append(round(hits / max(1, count), 4))
        soon[steps] = dict(zip(("updated", "any"), shares, strict=True))
    return {
        "tokens_a_read_in_order": round(tokens / sum(walk.reads_in_order for walk in walks), 2),
        "tokens_a_read_in_clusters": round(tokens / clusters, 2),
        "updates": sum(len(changed) for walk in walks for changed in walk.updated),
        "retrieved_within": soon,
    }


def walk_through(model: Any, ids: torch.Tensor, prompt: int, pages: int, size: int) -> list[Walk]:
    """Of each layer: the text ``[tokens]`` after the prompt, with clusters of `size` tokens."""
    walks = []

    def observe(seen: Observed) -> None:
        _, kv_heads, tokens, _ = seen.keys.shape
        keys = seen.keys[0].transpose(0, 1).flatten(1).float().contiguous()
        shared = seen.query[0].unflatten(0, (kv_heads, -1)).sum(1)  # [kv_heads, tokens, head_dim]
        queries = shared.transpose(0, 1).flatten(1).float()[prompt:]
        options = (1.25, 16, SINK_TOKENS, BLOCK_TOKENS, "adaptive")
        row = _C.Clusters(keys.shape[1], tokens, size, 2 * size, *options)
        row.enter_prompt(keys, (prompt - TAIL_TOKENS) // PAGE_TOKENS * PAGE_TOKENS)
        walk = Walk(pages)
        walk.follow(row, keys, queries, prompt)
        walks.append(walk)

    Calibrator(model).read(Sample(ids, prompt), observe)
    return walks


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    prompt: Annotated[int, typer.Option(help="tokens that are clustered at once")] = 1024,
    steps: Annotated[int, typer.Option(help="tokens that follow")] = 512,
    pages: Annotated[int, typer.Option(help=f"of {PAGE_TOKENS} tokens, a step's")] = 50,
    cluster_tokens: Annotated[int, typer.Option(help="that k-means aims at")] = 16,
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    seed: Annotated[int, typer.Option(help="of the text")] = 0,
    out: Annotated[str, typer.Option(help="absolute path of a results file; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads)
    network = load_model(str(model))
    ids = text_of(model, prompt + steps, seed)
    results = told(walk_through(network, ids, prompt, pages, cluster_tokens))
    Console(width=150).print(results)
    if out:
        machine.write(out, {"machine": machine.describe(Path(".")), "results": results})


if __name__ == "__main__":
    typer.run(main)
