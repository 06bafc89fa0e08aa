"""``kvswap calibrate``: a preset's projections from text, and the config around them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.errors import StorageError
from kvswap_torch.positions import most_positions
from kvswap_torch.tuning.cli import show_progress, write_json

HELP = """
Make the projections of a preset from text, once, in the place of each prompt's own.

For presets whose projections are of one block for each KV head: loki, infinigen, infinigen-star,
infinigen-star-ru, think. Loki's and InfiniGen's papers find theirs beforehand. Writes a config,
and the projections beside it. (`kvswap tune` finds kvswap's, and settings with them.)

Example:

    kvswap calibrate --model ./model --preset loki --path /fast/disk --out loki.json

Use the result with `KVSwapCache(model, path="/fast/disk", config="loki.json")`.
"""
LENGTHS = (4096, 8192)  # tokens of the samples at most


def main(
    model: Annotated[str, typer.Option(help="Folder or name of a transformers model.")],
    preset: Annotated[str, typer.Option(help="A preset with such projections.")],
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
    from kvswap_torch.tuning.blocks import fitted_preset, preset_of_blocks
    from kvswap_torch.tuning.documents import default_samples, samples_from_files

    # Before a model is loaded and text is drawn.
    preset_of_blocks(preset)
    if not path.is_dir():
        raise StorageError(errno.ENOENT, "--path must be a folder that exists", str(path))
    console = Console(stderr=json_out)
    network, tokenizer = load_model(model, say=console.print), load_tokenizer(model)
    longest = most_positions(network.config.get_text_config()) or max(LENGTHS)
    lengths = tuple(dict.fromkeys(min(length, longest) for length in LENGTHS))
    draw = samples_from_files if calibration else default_samples
    source = (tokenizer, calibration) if calibration else (tokenizer,)
    samples, _ = draw(*source, lengths)
    with show_progress(console) as progress:
        config = fitted_preset(network, preset, out, samples, alignment_bytes(path), progress)
    console.print(f"wrote {config.source} and {config.projection_path}")
    if json_out:
        write_json(config, None, Path("-"))
