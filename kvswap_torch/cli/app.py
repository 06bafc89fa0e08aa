"""``kvswap``: the commands and their options; what they do is in the modules beside this one.

``kvswap-torch`` and ``python -m kvswap_torch`` are the same. A command that has its options
elsewhere is one line at the end: ``app.command("name")(function)``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvswap_torch.cli import calibrate, compare, fit, presets, saved_app, serve
from kvswap_torch.cli.completion import saved_caches
from kvswap_torch.cli.report import print_error, print_interrupted
from kvswap_torch.cli.saved_app import Preset, Weights, WeightsMemory
from kvswap_torch.errors import KVSwapError
from kvswap_torch.tuning import cli as tuning
from kvswap_torch.version import __version__

INTERRUPTED = 130  # as a shell has it: 128 and SIGINT


class Commands(TyperGroup):
    """Ctrl-C ends a command with a line and status 130; what it held open is closed by then."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_interrupted()
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    name="kvswap",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="A KV cache that lives on disk, for Hugging Face models.\n\n"
    "Ctrl-C ends a command with status 130, and an answer of chat. If SIGINT is ignored when a "
    "command begins (nohup, & in a script), Ctrl-C has no effect; SIGTERM ends it. serve answers "
    "both signals in any case.",
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"kvswap_torch {__version__}")
        raise typer.Exit


@app.callback()
def _before_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_tell_version, help="Print the version, and end."
        ),
    ] = False,
) -> None:
    """What is asked of the program, not of a command."""


_GENERATE_HELP = """\
Answer questions about a long document from a KV cache that lives on disk.

The document is read once. Its keys and values go to a file without a name in --path, which is \
gone when the command ends. Then each question is asked in turn; each turn sees those before it.

[bold]Start here:[/bold] one document, one question, defaults for everything else.

  kvswap generate --model DIR --document book.txt --question "Who tells it?"

[bold]Less memory:[/bold] give a budget; the rest follows from it. Too little is refused \
with the minimum.

  ... --kv-memory 64MiB --path /fast/disk

[bold]As good as the full cache?[/bold] Run both; see answers, speeds and bytes side by side.

  ... --compare --json result.json

[bold]Several turns:[/bold] repeat --question.

  ... --question "Who tells it?" --question "Where does she live?"

[bold]Read once:[/bold] --save keeps what was read in a folder; --open goes on from it, without \
reading the document again. A --document beside it must be the one that was saved.

  ... --save book.kvswap
  kvswap generate --model DIR --open book.kvswap --question "Who tells it?"

[bold]A model larger than one machine:[/bold] torchrun starts the processes, each with its own \
part of the KV cache on its own disk; --kv-memory is per process. Heads within a machine, layers \
between machines.

  torchrun --standalone --nproc-per-node 2 -m kvswap_torch generate --tensor-parallel 2 ...

[bold]Prompts.[/bold] With --prompt-template auto, a model that has a chat template is asked \
through it; any other gets '{document}\\n\\nQuestion: {question}\\nAnswer:'. Give your own to \
change that: what follows {document} is repeated in each turn, and \\n is a new line.
"""


@app.command(help=_GENERATE_HELP)
def generate(
    model: Annotated[
        str, typer.Option(help="Folder (or hub name) of a Hugging Face model.", metavar="DIR")
    ],
    question: Annotated[
        list[str], typer.Option(help="A question; repeat for several turns.", metavar="TEXT")
    ],
    document: Annotated[
        Path | None, typer.Option(help="Text file, UTF-8; - reads stdin.", metavar="FILE")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Save the KV cache once the document is read.", metavar="BOOK.kvswap"),
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option(
            "--open",
            help="Go on from a saved KV cache.",
            metavar="BOOK.kvswap",
            autocompletion=saved_caches,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="What the tuner wrote, or SwapConfig.save().", metavar="config.json"),
    ] = None,
    preset: Preset = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Of a preset that drops tokens: how many are attended, or a share like 0.25.",
            metavar="N|SHARE",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="What groups are scored by, in the config's place: low_rank, box, mean or none."
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Who chooses groups, in the config's place: all KV heads together, or each."
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Most memory the KV cache may take.", metavar="512MiB"),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(
            help="Folder on the disk that holds the KV cache; else this one, or none with a preset "
            "that drops tokens.",
            metavar="DIR",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run with the full cache in memory.")
    ] = False,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the results here; - writes them to stdout.", metavar="OUT"
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write what the newest steps' time went to, for Perfetto.", metavar="TRACE"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer, in tokens.", metavar="N")
    ] = 200,
    device: Annotated[
        str, typer.Option(help="Where the model, pages and summaries are: cpu, cuda, cuda:1.")
    ] = "cpu",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of weights and KV; auto: as the model says."),
    ] = "auto",
    weights: Weights = None,
    weights_memory: WeightsMemory = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=64, help="Tokens of the document per forward pass.", metavar="N")
    ] = 4096,
    prompt_template: Annotated[
        str,
        typer.Option(help="auto, or a text with {document} and {question}.", metavar="TEXT"),
    ] = "auto",
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="Processes that share each layer's heads.", metavar="N"),
    ] = 1,
    pipeline: Annotated[
        int, typer.Option(min=1, help="Processes that share the layers.", metavar="N")
    ] = 1,
) -> None:
    from kvswap_torch.cli.generate import GenerateOptions, run
    from kvswap_torch.cli.report import STDOUT

    run(
        GenerateOptions(
            model=model,
            document=document,
            questions=tuple(question),
            save=save,
            saved=saved,
            config=config,
            preset=preset,
            keep=keep,
            rows=rows,
            heads=heads,
            kv_memory=kv_memory,
            path=path,
            compare=compare,
            json_out=json_out,
            timeline=timeline,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            weights=weights,
            weights_memory=weights_memory,
            device=device,
            prefill_chunk=prefill_chunk,
            prompt_template=prompt_template,
            tensor_parallel=tensor_parallel,
            pipeline=pipeline,
        ),
        # What is said on the way must not stand in what another program reads.
        Console(stderr=json_out == STDOUT),
    )


@app.command()
def info(
    path: Annotated[
        Path, typer.Option(help="Folder on the disk to ask about.", metavar="DIR")
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What this machine offers: reader and why, O_DIRECT, SIMD level, locked memory, versions."""
    from kvswap_torch.cli.info import show

    show(path, as_json, Console())


@app.command()
def cmake_prefix() -> None:
    """Print the folder for CMAKE_PREFIX_PATH, so that CMake finds kvswap.

    cmake -S . -B build -DCMAKE_PREFIX_PATH="$(kvswap cmake-prefix);$(python -c
    'import torch; print(torch.utils.cmake_prefix_path)')"
    """
    from kvswap_torch.cli.cmake_prefix import prefix

    print(prefix())


saved_app.add_to(app)
app.command("presets")(presets.main)
app.command("fit", help=fit.HELP)(fit.main)
app.command("serve", help=serve.HELP)(serve.serve)
app.command("compare", help=compare.HELP)(compare.main)
app.command("calibrate", help=calibrate.HELP)(calibrate.main)
app.command("tune", help=tuning.HELP)(tuning.main)


def main() -> None:
    """Runs a command; what the user can mend is one line on stderr and exit status 1."""
    try:
        app()
    except (KVSwapError, ImportError, OSError, ValueError) as error:
        print_error(error)
        sys.exit(1)
