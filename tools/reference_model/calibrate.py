"""Calibrates the reference model: writes kvswap.json and projection.safetensors beside it."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvswap_torch.errors import KVSwapError
from kvswap_torch.tuning.calibration import Calibration, CalibrationOptions, calibrate
from kvswap_torch.tuning.samples import Sample
from kvswap_torch.tuning.settings import Demand, choose_settings, engine_need, save_settings
from tools.reference_model.place import MODEL
from tools.reference_model.recall_report import print_calibration, print_chosen
from tools.reference_model.skills import make_sample
from tools.reference_model.tasks import answer_turn, question_prompt
from tools.reference_model.texts import MissingTexts, Text, load_texts

FITTED = (4096, 8192, 4096, 8192, 4096, 8192)  # tokens of each sample
MEASURED = (8192, 16384, 8192)
RANK_MAX = 128  # keeps the projections small beside the weights

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


def run(model, tokenizer, console: Console, seed: int = 0) -> Calibration:
    """Fits and measures, with a progress bar."""
    texts = load_texts()
    fitted = make_samples(tokenizer, texts, FITTED, 2 * seed + 5000, held_out=False)
    measured = make_samples(tokenizer, texts, MEASURED, 2 * seed + 9000, held_out=True)
    with Progress(console=console) as progress:
        tasks: dict[str, int] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        options = CalibrationOptions(rank_max=RANK_MAX)
        return calibrate(model, fitted, measured, options, progress=show)


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = MODEL,
    out: Annotated[Path | None, typer.Option(help="folder to write to; the model's")] = None,
    memory_share: Annotated[str, typer.Option(help="budget, of the full cache")] = "1/13",
    context: Annotated[int, typer.Option(help="tokens to be ready for")] = 32768,
    batch: Annotated[int, typer.Option(help="sequences to be ready for")] = 1,
    seed: int = 0,
) -> None:
    """Measure recall by layer and rank, hand out ranks under a budget, write the config."""
    console = Console(width=140)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        calibration = run(network, tokenizer, console, seed)
        print_calibration(calibration, console)
        full = batch * calibration.shape.kv_bytes(context)
        demand = Demand(context, batch, int(full * Fraction(memory_share)))
        chosen = choose_settings(calibration, demand, engine_need(network, demand))
        config = save_settings(out or model, calibration, chosen, demand)
    except (OSError, ValueError, KVSwapError, MissingTexts) as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    print_chosen(chosen, demand, full, console)
    console.print(f"wrote {config.source} and {config.projection_path}")


if __name__ == "__main__":
    app()
