"""Trains the reference model: python -m tools.reference_model.train --preset cpu."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from tools.reference_model.checkpoint import NAME, PREVIOUS, CheckpointError, write_atomic
from tools.reference_model.forms import Words
from tools.reference_model.model import export_model, load_weights, make_config, make_model
from tools.reference_model.phases import PRESETS
from tools.reference_model.place import MODEL, ROOT
from tools.reference_model.plot import draw_plot
from tools.reference_model.samples import Sampler, frequent_words
from tools.reference_model.texts import MissingTexts, load_texts
from tools.reference_model.tokens import encode_texts, save_tokenizer, train_tokenizer
from tools.reference_model.trainer import Run

WORK = ROOT / "build" / "reference_model"
CORES_ASSUMED = 2
THREADS_MAX = {"cpu": 2, "cuda": 8}
MEMORY_MIN_GIB = 6
EXTRA_WORDS_SHARE = 0.2

console = Console()
app = typer.Typer(add_completion=False)


def check_machine(preset: str) -> int:
    """Cores to use; warns about fewer than the times in the card assume.

    Raises
    ------
    ValueError
        When memory is too small, or there is no GPU for the GPU preset.
    """
    if preset == "gpu" and not torch.cuda.is_available():
        raise ValueError("train: preset gpu needs a CUDA device, got none; use --preset cpu")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if memory < MEMORY_MIN_GIB:
        raise ValueError(
            f"train: memory must be at least {MEMORY_MIN_GIB} GiB, got {memory:.1f};"
            " make `batch` and `length` of the phases smaller"
        )
    cores = len(os.sched_getaffinity(0))
    if cores < CORES_ASSUMED:
        console.print(f"[yellow]{cores} core: the times in the card assume {CORES_ASSUMED}")
    return cores


def prepare(
    work: Path, seed: int, init_from: Path | None = None
) -> tuple[Tokenizer, Sampler, Sampler]:
    """Tokenizer and samplers of training and held-out text; the tokenizer is made once."""
    texts = load_texts()
    path = work / "tokenizer.json"
    if init_from and not path.exists():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (init_from / name).exists():
                raise ValueError(f"init-from: {init_from} must hold {name}, got none")
            write_atomic(work / name, (init_from / name).read_bytes())
    if not path.exists():
        save_tokenizer(train_tokenizer(texts), work)
    tokenizer = Tokenizer.from_file(str(path))
    trained = [text for text in texts if not text.held_out]
    words = Words(frequent_words([text.body for text in trained]), EXTRA_WORDS_SHARE)
    order = np.random.default_rng(seed).permutation(len(trained))
    tokens = encode_texts(tokenizer, [trained[i] for i in order])
    held_out = encode_texts(tokenizer, [text for text in texts if text.held_out])
    return tokenizer, Sampler(tokenizer, tokens, words), Sampler(tokenizer, held_out, Words())


def export(run: Run, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, tokenizer, log and plot of the run as it stands."""
    export_model(run.model, folder, tokenizer.token_to_id("Ċ"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_atomic(folder / name, (run.folder / name).read_bytes())
    log = run.folder / "log.jsonl"
    if log.exists():
        write_atomic(folder / "training_log.jsonl", log.read_bytes())
        draw_plot(log, folder / "accuracy.png")


@dataclass(frozen=True)
class Options:
    """What a person asked for; see the help of each option below."""

    preset: str
    hours: float
    resume: bool
    export_only: bool
    init_from: Path | None
    first_phase: int
    work: Path
    out: Path
    seed: int


@app.command()
def main(
    preset: Annotated[str, typer.Option(help="cpu or gpu")] = "cpu",
    hours: Annotated[float, typer.Option(help="stop after so long; go on with --resume")] = 6.0,
    resume: Annotated[bool, typer.Option(help="go on from the last checkpoint")] = False,
    export_only: Annotated[bool, typer.Option(help="write the checkpoint's weights")] = False,
    init_from: Annotated[Path | None, typer.Option(help="begin with exported weights")] = None,
    first_phase: Annotated[int, typer.Option(help="phase to begin with, from 0")] = 0,
    work: Annotated[Path, typer.Option(help="checkpoints and log")] = WORK,
    out: Annotated[Path, typer.Option(help="where weights go")] = MODEL,
    seed: int = 0,
) -> None:
    """Train, or go on training, the reference model."""
    options = Options(preset, hours, resume, export_only, init_from, first_phase, work, out, seed)
    try:
        check_options(options)
        train(options)
    except (ValueError, MissingTexts, CheckpointError) as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error


def check_options(options: Options) -> None:
    """Refuse what cannot be meant.

    Raises
    ------
    ValueError
        Naming the option, what must hold, and what came.
    """
    if options.preset not in PRESETS:
        raise ValueError(f"train: preset must be one of {sorted(PRESETS)}, got {options.preset!r}")
    phases = len(PRESETS[options.preset])
    if not 0 <= options.first_phase < phases:
        raise ValueError(f"train: first-phase must be 0 to {phases - 1}, got {options.first_phase}")
    found = any((options.work / name).exists() for name in (NAME, PREVIOUS))
    if found and not (options.resume or options.export_only):
        raise ValueError(
            f"train: {options.work} must hold no checkpoint, got one; add --resume to go on,"
            " or move it away"
        )


def train(options: Options) -> None:
    """Prepare, train and export."""
    device = "cuda" if options.preset == "gpu" else "cpu"
    torch.set_num_threads(min(check_machine(options.preset), THREADS_MAX[device]))
    torch.manual_seed(options.seed)
    make_folder(options.work)
    tokenizer, sampler, held_out = prepare(options.work, options.seed, options.init_from)
    model = make_model(make_config()).to(device)
    if options.init_from:
        load_weights(model, options.init_from)
    phases = PRESETS[options.preset]
    run = Run(model, phases, sampler, held_out, options.work, options.seed, device)
    run.place.phase = options.first_phase
    if options.resume or options.export_only:
        for complaint in run.resume():
            console.print(f"[yellow]{complaint}")
    if not options.export_only:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(run, "stopping", True))
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            finished = run.train(options.hours * 3600, progress)
        console.print("finished" if finished else "stopped; go on with --resume")
    export(run, tokenizer, options.out)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"train: {folder} must be a folder to write to: {error}") from error


if __name__ == "__main__":
    app()
