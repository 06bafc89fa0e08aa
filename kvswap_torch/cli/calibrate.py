"""``kvswap calibrate``: what a preset must know of a model, from text, and the config around it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.cli.reading import waiting
from kvswap_torch.cli.targets import check_directory, check_file
from kvswap_torch.positions import most_positions
from kvswap_torch.tuning.cli import show_progress, write_json

HELP = """
Find what a preset must know of a model, once, from text.

Projections, in the place of each prompt's own: kvswap-paper, loki, infinigen, infinigen-star,
infinigen-star-ru, think. KVSwap's, Loki's and InfiniGen's papers find theirs beforehand.
Which query heads find what is asked for, and what layers lose: compresskv; the model must be able
to answer questions about facts in a text. Writes a config, and projections or heads beside it.
(`kvswap tune` finds kvswap's, and settings with them; with `--projection svd_keys` the paper's.)

Example:

    kvswap calibrate --model ./model --preset loki --path /fast/disk --out loki.json

Use the result with `KVSwapCache(model, path="/fast/disk", config="loki.json")`.
"""


def main(
    model: Annotated[str, typer.Option(help="Folder or name of a transformers model.")],
    preset: Annotated[str, typer.Option(help="A preset that takes one of these.")],
    path: Annotated[Path, typer.Option(help="Folder on the disk to use.")] = Path("."),
    out: Annotated[Path, typer.Option(help="Config to write.")] = Path("config.json"),
    calibration: Annotated[
        list[Path] | None, typer.Option(help="Text files to calibrate on; default: shipped text.")
    ] = None,
    json_out: Annotated[
        bool, typer.Option("--json", help="Print the files' paths and the settings as JSON.")
    ] = False,
) -> None:
    """See `HELP`."""
    from kvswap_torch.hf.session import alignment_bytes
    from kvswap_torch.preset import find
    from kvswap_torch.tuning.blocks import fitted_preset, preset_to_fit
    from kvswap_torch.tuning.heads import heads_path, preset_of_heads

    # Before a model is loaded and text is drawn.
    takes_heads = "retention.scoring_heads" in find(preset).needs
    if not takes_heads:
        preset_to_fit(preset)
    check_directory("--path", path)
    check_file("--out", out)
    console = Console(stderr=json_out)
    tokenizer = load_tokenizer(model)
    with waiting("loading the model", console):
        network = load_model(model, say=console.print)
    most = most_positions(network.config.get_text_config())
    draw = _searches if takes_heads else _samples
    make = preset_of_heads if takes_heads else fitted_preset
    samples = draw(tokenizer, calibration or [], most)
    with show_progress(console) as progress:
        config = make(network, preset, out, samples, alignment_bytes(path), progress)
    heads = heads_path(out) if takes_heads else None
    console.print(f"wrote {config.source} and {heads or config.projection_path}")
    if json_out:
        write_json(config, Path("-"), heads=heads)


def _samples(tokenizer: Any, files: list[Path], most: int | None) -> list[Any]:
    from kvswap_torch.tuning.documents import LENGTHS, default_samples, samples_from_files

    lengths = _lengths(LENGTHS, most)
    if files:
        return samples_from_files(tokenizer, files, lengths)[0]
    return default_samples(tokenizer, lengths)[0]


def _searches(tokenizer: Any, files: list[Path], most: int | None) -> list[Any]:
    from kvswap_torch.tuning.documents import read_text
    from kvswap_torch.tuning.searches import COUNT, LENGTHS, search_samples

    texts = [read_text(file) for file in files] or None
    return search_samples(tokenizer, texts, _lengths(LENGTHS, most), COUNT)


def _lengths(wanted: tuple[int, ...], most: int | None) -> tuple[int, ...]:
    """No longer than the model takes."""
    return tuple(dict.fromkeys(min(length, most or length) for length in wanted))
