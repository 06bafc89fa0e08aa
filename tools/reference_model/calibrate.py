"""Tunes for the reference model: writes kvswap.json, and its projections, beside it."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvswap_torch.errors import KVSwapError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.tuning.api import tune
from kvswap_torch.tuning.result import print_result
from kvswap_torch.tuning.samples import Sample
from tools.reference_model.place import MODEL
from tools.reference_model.skills import make_sample
from tools.reference_model.tasks import answer_turn, question_prompt
from tools.reference_model.texts import MissingTexts, Text, load_texts

FITTED = (4096, 8192, 4096, 8192, 4096, 8192)  # tokens of each sample
MEASURED = (8192, 16384, 8192)

app = typer.Typer(add_completion=False)


def make_samples(
    tokenizer, texts: list[Text], lengths: tuple[int, ...], seed: int, held_out: bool
) -> list[Sample]:
    """Text with facts of every skill laid in, followed by questions and answers.

    Parameters
    ----------
    lengths
        Tokens of each sample.
    held_out
        Take the texts that the model was not trained on.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    bodies = [text.body for text in texts if text.held_out == held_out]
    samples = []
    for number, length in enumerate(lengths):
        rng = np.random.default_rng(seed + number)
        text = _draw_text(rng, bodies, 6 * length)
        room = length - 1024  # for the turns
        document, asked = make_sample(seed + number, text, room, lambda t: len(encode(t)))
        turns = [asked[i].question for i in rng.permutation(len(asked))]
        read = encode(document)
        decoded = encode("".join(question_prompt(q) + answer_turn(q) for q in turns))
        samples.append(Sample(torch.tensor(read + decoded), len(read)))
    return samples


def _draw_text(rng: np.random.Generator, bodies: list[str], characters: int) -> str:
    drawn, length = [], 0
    for i in rng.permutation(len(bodies)):
        drawn.append(bodies[i])
        length += len(bodies[i])
        if length > 2 * characters:
            break
    joined = "\n".join(drawn)
    first = int(rng.integers(max(1, len(joined) - characters)))
    return joined[first:][:characters]


def draw_samples(tokenizer, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """To fit, from texts that the model knows; to measure, from others."""
    texts = load_texts()
    return (
        make_samples(tokenizer, texts, FITTED, 2 * seed + 5000, held_out=False),
        make_samples(tokenizer, texts, MEASURED, 2 * seed + 9000, held_out=True),
    )


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = MODEL,
    out: Annotated[Path | None, typer.Option(help="folder to write to; the model's")] = None,
    path: Annotated[Path, typer.Option(help="folder on the disk to tune for")] = Path("."),
    memory_share: Annotated[str, typer.Option(help="budget, of the full cache")] = "1/13",
    context: Annotated[int, typer.Option(help="tokens to be ready for")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences to be ready for")] = 1,
    seed: int = 0,
) -> None:
    """Tune for the model's own tasks, write the config."""
    console = Console(width=140)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        full = batch * model_parts(network).shape.kv_bytes(context)
        with Progress(console=console) as progress:
            tasks: dict[str, TaskID] = {}

            def show(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = progress.add_task(what, total=total)
                progress.update(tasks[what], completed=done)

            result = tune(
                network,
                context,
                batch,
                int(full * Fraction(memory_share)),
                path,
                samples=draw_samples(tokenizer, seed),
                progress=show,
            )
        config = result.save((out or model) / "kvswap.json")
    except (OSError, ValueError, KVSwapError, MissingTexts) as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    print_result(result, console)
    console.print(f"wrote {config.source} and {config.projection_path}")


if __name__ == "__main__":
    app()
