"""Long decoding: milliseconds and agreement with the full cache by the tokens decoded so far.

    python -m bench long_decode --out long_decode \\
        --methods "product:memory=1/13 product:preset=dynakv,memory=1/4"

A prompt is read, and the text that follows it comes token by token, teacher-forced. At each mark:
the median step of the last 256; of the tokens since the mark before, at how many the most likely
next token is the full cache's, and how much more of the text's own token is lost, in nats. What the
full cache tells is computed in long passes; `full` is the full cache token by token, in other
products of the same numbers, so that its agreement is what can be had. Methods are written as for
`python -m bench quality`, and memory is a share of the cache at the end. One runs after the other.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from bench import machine
from bench.quality.harness import REFERENCE
from bench.quality.methods import product_settings
from bench.quality.product import Product
from bench.quality.text import Texts
from bench.reading import CHUNK, read, step
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.compare.budget import Bytes
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.full_cache import full_cache
from kvswap_torch.positions import most_positions

TIMED = 256  # steps before a mark
Next = tuple[torch.Tensor, torch.Tensor]  # [tokens]: the most likely next token; the text's, nats


def next_tokens(logits: torch.Tensor, following: torch.Tensor) -> Next:
    """Of logits ``[tokens, vocabulary]`` and the tokens that the text goes on with."""
    lost = torch.nn.functional.cross_entropy(logits.float(), following, reduction="none")
    return logits.argmax(-1), lost


def joined(found: list[Next]) -> Next:
    """Of texts that follow one another."""
    likely, lost = zip(*found, strict=True)
    return torch.cat(likely), torch.cat(lost)


@torch.inference_mode()
def in_passes(model: Any, ids: torch.Tensor, prompt: int) -> Next:
    """What the full cache tells after the prompt, computed in long passes."""
    cache = full_cache(model, "long_decode")
    read(model, cache, ids[:prompt])
    found = []
    for chunk in ids[prompt:-1].split(CHUNK):
        first = cache.get_seq_length() + 1
        logits = model(input_ids=chunk[None], past_key_values=cache).logits[0]
        found.append(next_tokens(logits, ids[first : first + len(chunk)]))
    return joined(found)


def run(model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> tuple[Next, list[float]]:
    """A method's next tokens after the prompt, and the seconds of each step."""
    read(model, cache, ids[:prompt])
    found, seconds = [], []
    for place in track(range(prompt, len(ids) - 1), "decoding"):
        took, logits = step(model, cache, ids[place])
        seconds.append(took)
        found.append(next_tokens(logits, ids[place + 1 : place + 2]))
    return joined(found), seconds


def between(marks: list[int]) -> list[tuple[int, int]]:
    """From each mark's predecessor, at first 0, to the mark."""
    return list(zip([0, *marks[:-1]], marks, strict=True))


def by_marks(told: Next, full: Next, marks: list[int]) -> list[dict[str, float]]:
    """Of the tokens between each mark and the one before: the same token, and more nats lost."""
    rows = []
    for begin, end in between(marks):
        same = (told[0][begin:end] == full[0][begin:end]).double().mean()
        more = (told[1][begin:end] - full[1][begin:end]).double().mean()
        rows.append({"same_token": round(float(same), 4), "nats": round(float(more), 4)})
    return rows


def rows_of(
    model: Any, cache: Any, ids: torch.Tensor, prompt: int, full: Next, marks: list[int]
) -> list[dict[str, float]]:
    """What one cache gives at each mark."""
    told, seconds = run(model, cache, ids, prompt)
    rows = by_marks(told, full, marks)
    for row, mark in zip(rows, marks, strict=True):
        row["ms"] = round(1e3 * statistics.median(seconds[max(0, mark - TIMED) : mark]), 2)
    return rows


def text_of(model: Path, tokens: int, seed: int) -> torch.Tensor:
    """``[tokens]`` int64 of held-out text."""
    tokenizer = load_tokenizer(str(model))
    text = Texts().draw(np.random.default_rng(seed), 8 * tokens)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    if len(ids) < tokens:
        raise ValueError(f"text: must have {tokens} tokens, got {len(ids)} of 8 characters each")
    return ids[:tokens]


def main(
    methods: Annotated[str, typer.Option(help="product:..., with spaces between")] = "",
    model: Annotated[Path, typer.Option(help="folder of the model")] = REFERENCE,
    prompt: Annotated[int, typer.Option(help="tokens that are read before")] = 2048,
    marks: Annotated[str, typer.Option(help="tokens decoded")] = "1024,2048,4096,8192,16384",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    seed: Annotated[int, typer.Option(help="of the text")] = 0,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    torch.set_num_threads(threads)
    described, network = machine.describe(path), load_model(str(model))
    decoded = sorted({int(mark) for mark in marks.split(",")})
    ids = text_of(model, prompt + decoded[-1] + 1, seed)
    parts = model_parts(network)
    most = most_positions(parts.config)
    if most is not None and len(ids) > most:
        raise typer.BadParameter(f"marks: the model was made for {most} tokens, got {len(ids)}")
    size = Bytes(parts, len(ids), path)
    full = in_passes(network, ids, prompt)
    text = [float(full[1][begin:end].mean()) for begin, end in between(decoded)]
    cache = full_cache(network, "long_decode")
    told: dict[str, Any] = {
        "full": {"marks": rows_of(network, cache, ids, prompt, full, decoded), "nats": text}
    }
    for name in methods.split():
        try:
            product = Product.named(name, product_settings(name), size)
            with product.opened(network, path, len(ids)) as cache:
                rows = rows_of(network, cache, ids, prompt, full, decoded)
                told[name] = {"marks": rows} | product.facts(cache)
            told[name]["memory_share"] = round(told[name]["memory_bytes"] / size.full, 4)
        except BudgetError as error:
            told[name] = {"impossible": str(error)}
    Console().print(told)
    facts = {"machine": described, "model": model.resolve().name, "threads": threads}
    if out:
        machine.write(out, facts | {"prompt": prompt, "decoded": decoded, "methods": told})


if __name__ == "__main__":
    typer.run(main)
