"""ms of a token whose decoder layers are on disk: accelerate alone, our cache, and reading ahead.

    python -m bench offload --model build/models/smollm2 --out offload_smollm2
    python -m bench offload --model 1b --out offload_1b

accelerate's `device_map` puts every decoder layer on disk; all else stays in memory. Our cache is
the preset `exact`, which attends every token, so that tokens must be those of `DynamicCache`. First
the files are in the page cache, then they are dropped from it before each token. A turn is a token
that does not count, so that nothing is read ahead while others have the machine, and some that do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bench import machine
from bench.contenders import Contender
from bench.opening import drop_pages
from bench.reading import read
from bench.shapes import SHAPES, make_model
from bench.side_by_side.child import disk_bytes
from bench.side_by_side.plan import Cell
from bench.side_by_side.weights import read_through
from kvswap_torch import KVSwapCache
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.offloaded import StoredTensors
from kvswap_torch.hf.weights_memory import make_ready
from kvswap_torch.hf.weights_reader import read_ahead

FIRST = "accelerate, DynamicCache"  # what others are compared with
# Name -> what is done to the model. The last is what `--weights-memory` does.
OURS: dict[str, Callable[[Any], Any]] = {
    "accelerate, kvswap": lambda model: None,
    "read ahead, kvswap": read_ahead,
    "read ahead, kvswap, our linear layers": make_ready,
}
PAGES = ("cached", "dropped")  # the files' in the page cache


class Offloaded(Contender):
    """A model of its own and a cache that has read the prompt, ``[tokens]`` int64."""

    def __init__(self, model: Any, cache: Any, ids: torch.Tensor):
        super().__init__(model, cache, 1, len(ids))
        self.tokens: list[int] = []
        self.turns: dict[str, list[dict[str, float]]] = {pages: [] for pages in PAGES}
        read(model, cache, ids)

    def take(self, pages: str, folder: Path, steps: int) -> None:
        """A turn: seconds and bytes from disk of a token."""
        before = 0
        for number in range(steps + 1):
            if pages == "dropped":
                drop_pages(folder)
            if number == 1:
                before = disk_bytes()["read_bytes"]
            self.step()
            self.tokens.append(int(self.ids))
        moved = disk_bytes()["read_bytes"] - before
        seconds = statistics.mean(self.seconds[-steps:])
        self.turns[pages].append({"seconds": seconds, "read": moved / steps})


def open_offloaded(folder: Path) -> Any:
    """The model in a folder, its decoder layers on disk."""
    layers = AutoConfig.from_pretrained(folder).num_hidden_layers
    kept = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(kept, "cpu") | {f"model.layers.{i}": "disk" for i in range(layers)}
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=places, dtype="auto")
    for parameter in loaded.parameters():
        if not parameter.is_meta:  # a mapped file's pages cannot be dropped
            parameter.data = parameter.data.clone()
    return loaded.eval()


def folder_of(model: str, tokens: int) -> Path:
    """A model's folder; of a shape's name one with random weights, made when it is not there."""
    if model not in SHAPES:
        return Path(model)
    folder = Path("build/offload") / model
    if not (folder / "model.safetensors").exists():
        make_model(Cell(model, tokens, batch=1).shape, tokens).save_pretrained(folder)
    return folder


def open_all(folder: Path, ids: torch.Tensor, path: Path, room: int) -> dict[str, Offloaded]:
    """room: tokens that will be decoded, at most."""
    plain = open_offloaded(folder)
    found = {FIRST: Offloaded(plain, DynamicCache(config=plain.config), ids)}
    for name, prepare in OURS.items():
        model = open_offloaded(folder)
        prepare(model)
        most = {"max_context": len(ids) + room, "max_batch": 1}
        found[name] = Offloaded(model, KVSwapCache(model, path, preset="exact", **most), ids)
    return found


def check_same(contenders: dict[str, Offloaded]) -> None:
    expected = contenders[FIRST].tokens
    for name, each in contenders.items():
        if each.tokens != expected:
            raise RuntimeError(f"{name}: must decode {expected}, as {FIRST}, got {each.tokens}")


def summary(turns: list[dict[str, float]], first: list[dict[str, float]]) -> dict[str, Any]:
    """ms and MB of a token, and the median of its share of the first's time in the same round."""
    low, middle, high = statistics.quantiles([1e3 * turn["seconds"] for turn in turns], n=4)
    pairs = [a["seconds"] / b["seconds"] for a, b in zip(turns, first, strict=True)]
    return {
        "ms": round(middle, 2),
        "ms_quartiles": [round(low, 2), round(high, 2)],
        "bytes_read": round(statistics.median(turn["read"] for turn in turns)),
        "ratio_of_pairs": round(statistics.median(pairs), 3),
    }


def told_of(contenders: dict[str, Offloaded]) -> dict[str, Any]:
    """What was on disk, and by the state of the page cache each contender's summary."""
    model = contenders[FIRST].model
    pages = {
        pages: {
            name: summary(each.turns[pages], contenders[FIRST].turns[pages])
            for name, each in contenders.items()
        }
        for pages in PAGES
    }
    layer_bytes = sum(tensor.nbytes for tensor in StoredTensors(model).values())
    return {"layers": len(model_parts(model).layers), "layer_bytes": layer_bytes, "pages": pages}


def main(
    model: Annotated[str, typer.Option(help=f"a folder, or of {', '.join(SHAPES)}")] = "1b",
    tokens: Annotated[int, typer.Option(min=2, help="of the prompt")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="tokens of a turn that count")] = 4,
    rounds: Annotated[int, typer.Option(min=2, help="of a turn of each")] = 7,
    path: Annotated[Path, typer.Option(help="folder on the disk, for K and V")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder, began = folder_of(model, tokens), time.perf_counter()
    described = machine.describe(folder)  # whose disk has the weights
    ids = torch.randint(4096, (tokens,), generator=torch.Generator().manual_seed(0))
    console = Console()
    with console.status("reading the prompt"):
        contenders = open_all(folder, ids, path, 2 * rounds * (steps + 1) + 1)
    for file in folder.glob("*.safetensors"):
        read_through(file)
    for pages in PAGES:
        for number in range(rounds):
            for name, each in contenders.items():
                with console.status(f"{pages}, round {number + 1} of {rounds}: {name}"):
                    each.take(pages, folder, steps)
            check_same(contenders)
    results = {"machine": described, "model": folder.name, "tokens": tokens}
    results |= {"rounds": rounds, "steps": steps} | told_of(contenders)
    results["seconds"] = round(time.perf_counter() - began, 1)
    for each in contenders.values():
        each.close()
    console.print(results)
    if out:
        machine.write(out, results)


if __name__ == "__main__":
    typer.run(main)
