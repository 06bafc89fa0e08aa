"""``kvswap tune``: measures a model and a disk and writes the config of a cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvswap_torch.cli.load import load_model
from kvswap_torch.cli.report import print_error
from kvswap_torch.cli.saved_app import Weights
from kvswap_torch.cli.targets import check_directory, check_file
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import ConfigError, KVSwapError
from kvswap_torch.few_bits import check_format
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.positions import most_positions

WANTED = "a model's folder or name"
USUAL_CONTEXT = 32768  # tokens
INTERRUPTED = "interrupted; what was measured is kept, the same command goes on from it"

app = typer.Typer(rich_markup_mode="markdown")

HELP = """
Find the best settings for a model on a disk within a memory limit.

Measures the disk (under a minute), calibrates the model on text with facts and questions in it,
times decoding steps, and chooses the fastest settings that still find what attention looks for.
Writes a config, the projections beside it, and a folder of measurements and pictures:
a second run with another memory limit takes seconds.

Example:

    kvswap tune --model ./model --path /fast/disk --max-context 32768 --kv-memory 512MiB

Use the result with `KVSwapCache(model, path="/fast/disk", config="config.json",
kv_memory_bytes="512MiB")`.

With `--preset NAME` the settings of that published method are searched instead: its own grid,
a few dozen points at most (`kvswap_torch.preset.grid`). Each point that fits is decoded with on
held-out text. The fastest is written that loses at most 0.01 of the best recall, or of the best
agreement with the full cache where the method selects nothing:

    kvswap tune --preset quest --model ./model --path /fast/disk --kv-memory 512MiB
"""


class Bars:
    """One progress bar for each kind of work; called as `tune` calls its progress."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Bars where somebody looks on; plain lines in a log or a pipe."""
    from kvswap_torch.tuning.progress import Lines

    if console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as progress:
            yield Bars(progress)
    else:
        with Lines(lambda line: print(line, file=console.file, flush=True)) as lines:
            yield lines


def write_json(config: SwapConfig, out: Path, **others: Path | None) -> None:
    """Writes the files' paths (``config``, ``projections``, `others`) and the ``settings``."""
    files = {"config": config.source, "projections": config.projection_path, **others}
    told: dict[str, Any] = {name: path and str(path) for name, path in files.items()}
    told["settings"] = json.loads(config.source.read_text(encoding="utf-8"))
    text = json.dumps(told, indent=2) + "\n"
    if out == Path("-"):
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


@app.command(help=HELP)
def main(
    model: Annotated[str, typer.Option(help="Folder or name of a transformers model.")],
    path: Annotated[Path, typer.Option(help="Folder on the disk to use.")],
    kv_memory: Annotated[str, typer.Option(help="Limit for the cache in memory, like 512MiB.")],
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1024,
            help="Tokens of a sequence.  [default: 32768, or what the model was made for]",
            show_default=False,
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    out: Annotated[Path, typer.Option(help="Config to write.")] = Path("config.json"),
    calibration: Annotated[
        list[Path] | None, typer.Option(help="Text files to calibrate on; default: shipped text.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Tune for a modelled device: nvme, ufs, ufs3 or emmc.")
    ] = "",
    solver: Annotated[
        str, typer.Option(help="exhaustive, or greedy (the paper's).")
    ] = "exhaustive",
    min_recall: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="What choices must find: a fifth attention mass, the rest look-ups."
        ),
    ] = 0.0,
    exposed_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of loading that may stay visible (greedy).")
    ] = 0.0,
    uniform_rank: Annotated[bool, typer.Option(help="One rank for all layers.")] = False,
    projection: Annotated[
        str, typer.Option(help="query_aware, or svd_keys (the paper's).")
    ] = "query_aware",
    records: Annotated[
        str,
        typer.Option(help="What records hold: model, fp8, int4, both (model and fp8) or all."),
    ] = "model",
    evaluate: Annotated[
        bool, typer.Option(help="Decode the held-out questions with the result.")
    ] = False,
    preset: Annotated[
        str, typer.Option(help="Search this preset's own settings; `kvswap presets` lists them.")
    ] = "",
    weights: Weights = None,
    work: Annotated[
        Path | None, typer.Option(help="Measurements and report; default: OUT with .tuning.")
    ] = None,
    report: Annotated[bool, typer.Option(help="Draw pictures and a page.")] = True,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write files, settings and measurements here; - writes them to stdout."
        ),
    ] = None,
) -> None:
    from kvswap_torch.tuning.api import tune
    from kvswap_torch.tuning.pipeline import TuneOptions
    from kvswap_torch.tuning.report import require_matplotlib
    from kvswap_torch.tuning.result import print_result

    console = Console(stderr=json_out == Path("-"))
    try:
        if preset:
            given = (solver, min_recall, exposed_share, uniform_rank, projection, records, evaluate)
            _check_preset(preset, device, (*given, work))
        elif report:
            require_matplotlib()  # not after minutes of measuring
        options = TuneOptions(
            device=device,
            solver=solver,
            min_recall=min_recall,
            exposed_share=exposed_share,
            uniform_rank=uniform_rank,
            records=records,
            projection=projection,
        )
        _check_places(path, out, json_out)
        memory = parse_bytes(kv_memory, "--kv-memory")
        check_format(weights)
        network = load_model(model, say=console.print, wanted=WANTED, weights=weights)
        context = max_context or _usual_context(network)
        if preset:
            place = (context, max_batch, memory, path)
            config = _tune_preset(network, preset, place, model, calibration, device, out, console)
            if json_out is not None:
                write_json(config, json_out)
            return
        with show_progress(console) as progress:
            result = tune(
                network,
                max_context_len=context,
                max_batch_size=max_batch,
                kv_memory=kv_memory,
                path=path,
                tokenizer=model,
                calibration=calibration,
                options=options,
                work=work or out.with_suffix(".tuning"),
                evaluate=evaluate,
                progress=progress,
                tell=lambda sentence: console.print(sentence, soft_wrap=True, highlight=False),
            )
        config = result.save(out)
        print_result(result, console)
        console.print(f"wrote {config.source} and {config.projection_path}")
        if page := result.report(work or out.with_suffix(".tuning")) if report else None:
            console.print(f"wrote {page}: why these settings")
        if json_out is not None:
            write_json(config, json_out, report=page)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        raise typer.Exit(130) from None
    except (KVSwapError, ImportError, OSError, ValueError) as error:
        print_error(error)
        raise typer.Exit(1) from error


def _check_places(path: Path, out: Path, json_out: Path | None) -> None:
    check_directory("--path", path)
    check_file("--out", out)
    if json_out not in (None, Path("-")):
        check_file("--json", json_out)


def _usual_context(model: Any) -> int:
    return min(USUAL_CONTEXT, most_positions(model.config.get_text_config()) or USUAL_CONTEXT)


# What belongs to the tuner of kvswap's own settings: value without the option.
_NOT_WITH_PRESET = {
    "solver": "exhaustive",
    "min_recall": 0.0,
    "exposed_share": 0.0,
    "uniform_rank": False,
    "projection": "query_aware",
    "records": "model",
    "evaluate": False,
    "work": None,
}


def _check_preset(name: str, device: str, given: tuple[Any, ...]) -> None:
    """Before a model is loaded; given: what `_NOT_WITH_PRESET` names, in its order."""
    from kvswap_torch.preset.grid import grid_of
    from kvswap_torch.tuning.pipeline import MODELLED

    grid_of(name)
    others = [
        option
        for (option, usual), value in zip(_NOT_WITH_PRESET.items(), given, strict=True)
        if value != usual
    ]
    if others:
        named = ", ".join("--" + option.replace("_", "-") for option in others)
        raise ConfigError(
            f"tune: with --preset must come without {named}, which the tuner of kvswap's own "
            f"settings takes, got --preset {name}; leave one of them out"
        )
    if device not in ("", *MODELLED):
        raise ConfigError(
            f"tune: with --preset --device must be one of {', '.join(MODELLED)}, got {device!r}"
        )


def _tune_preset(
    network: Any,
    name: str,
    place: tuple[int, int, int, Path],
    tokenizer: str,
    calibration: list[Path] | None,
    device: str,
    out: Path,
    console: Console,
) -> SwapConfig:
    """place: context, batch, bytes and folder."""
    from kvswap_torch.tuning.api import held_out_samples
    from kvswap_torch.tuning.presets import tune_preset

    samples = held_out_samples(network, tokenizer, calibration, place[0])
    with show_progress(console) as progress:
        found = tune_preset(network, name, *place, samples, device=device, progress=progress)
    for line in found.lines():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"memory at batch {found.batch} and {found.context:,} tokens; the rest at "
        f"{found.tokens:,} tokens of one sequence; least lost of: {found.measure}",
        highlight=False,
    )
    config = found.save(out)
    console.print(f"wrote {config.source}")
    return config
