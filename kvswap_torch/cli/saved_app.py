"""The options of ``kvswap ingest``, ``ask``, ``chat``, ``show``, ``verify`` and ``rm``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from kvswap_torch.cli.completion import preset_names, saved_caches

Saved = Annotated[
    Path,
    typer.Argument(
        help="Folder of a saved cache.", metavar="BOOK.kvswap", autocompletion=saved_caches
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Its model; else where it was when saved.", metavar="DIR")
]
Memory = Annotated[
    str | None, typer.Option(help="Most memory the KV cache may take.", metavar="512MiB")
]
Place = Annotated[Path, typer.Option(help="Folder on the disk for new records.", metavar="DIR")]
Template = Annotated[str, typer.Option(help="auto, or a text with {document} and {question}.")]
Preset = Annotated[
    str | None,
    typer.Option(
        help="A published system, in the config's place: see kvswap presets.",
        autocompletion=preset_names,
    ),
]
Weights = Annotated[
    Literal["bf16", "int8", "int4"] | None,
    typer.Option(
        help="Format of the weights, on the CPU; else as they were saved.", show_default=False
    ),
]
WeightsMemory = Annotated[
    str | None,
    typer.Option(
        help="Most memory for weights: other layers are read from disk for each token.",
        metavar="6GiB",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ingest(
    document: Annotated[Path, typer.Argument(help="Text in UTF-8, or a PDF; - reads stdin.")],
    model: Annotated[str, typer.Option(help="Folder of a Hugging Face model.", metavar="DIR")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write.", metavar="BOOK.kvswap")
    ],
    config: Annotated[
        Path | None, typer.Option(help="What the tuner wrote.", metavar="config.json")
    ] = None,
    preset: Preset = None,
    kv_memory: Memory = None,
    weights: Weights = None,
    weights_memory: WeightsMemory = None,
    path: Place = Path("."),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace it.")] = False,
    prefill_chunk: Annotated[int, typer.Option(min=64, metavar="N")] = 4096,
    prompt_template: Template = "auto",
    as_json: Json = False,
) -> None:
    """Read a document once and save its KV cache, to be asked by kvswap ask."""
    from kvswap_torch.cli import saved
    from kvswap_torch.cli.generate import GenerateOptions

    options = GenerateOptions(
        model=model,
        document=document,
        questions=(),
        config=config,
        preset=preset,
        kv_memory=kv_memory,
        weights=weights,
        weights_memory=weights_memory,
        path=path,
        prefill_chunk=prefill_chunk,
        prompt_template=prompt_template,
    )
    saved.ingest(options, output, overwrite, Console(stderr=as_json))
    if as_json:
        saved.show(output, True, Console())


def _options(
    book: Path, model: str | None, kv_memory: str | None, path: Path, template: str, **asked: Any
) -> Any:
    """A run over a saved document."""
    from kvswap_torch.cli.generate import GenerateOptions

    return GenerateOptions(
        model=model or "",
        document=book,
        questions=asked.pop("questions", ()),
        kv_memory=kv_memory,
        path=path,
        prompt_template=template,
        **asked,
    )


def ask(
    book: Saved,
    question: Annotated[list[str], typer.Option(help="A question; may be repeated.")],
    model: Model = None,
    kv_memory: Memory = None,
    weights: Weights = None,
    weights_memory: WeightsMemory = None,
    path: Place = Path("."),
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N")] = 200,
    prompt_template: Template = "auto",
    as_json: Json = False,
) -> None:
    """Ask a saved document: it is opened, not read again."""
    import json

    from kvswap_torch.cli import saved

    asked = {"questions": tuple(question), "max_new_tokens": max_new_tokens, "weights": weights}
    asked["weights_memory"] = weights_memory
    options = _options(book, model, kv_memory, path, prompt_template, **asked)
    answers = saved.ask(book, model, options, Console(stderr=as_json))
    if as_json:
        Console().print_json(json.dumps(answers))


def chat(
    book: Saved,
    model: Model = None,
    kv_memory: Memory = None,
    weights: Weights = None,
    weights_memory: WeightsMemory = None,
    path: Place = Path("."),
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N")] = 200,
    prompt_template: Template = "auto",
    as_json: Json = False,
) -> None:
    """Talk about a saved document in the terminal; /ask, /back and /stats beside questions."""
    import dataclasses
    import json

    from kvswap_torch.cli import saved
    from kvswap_torch.cli.chat import Chat
    from kvswap_torch.process_memory import keep_little_code

    keep_little_code()
    loaded = {"weights": weights, "weights_memory": weights_memory}
    options = _options(book, model, kv_memory, path, prompt_template, **loaded)
    console = Console(stderr=as_json)
    with saved.opened(book, model, options, console) as conversation:
        Chat(conversation, max_new_tokens, console).run()
        turns = [dataclasses.asdict(turn) for turn in conversation.turns]
    if as_json:
        Console().print_json(json.dumps(turns))


def show(book: Saved, as_json: Json = False) -> None:
    """What a saved cache holds; its small files are checked whole."""
    from kvswap_torch.cli import saved

    saved.show(book, as_json, Console())


def verify(
    book: Annotated[
        Path | None, typer.Argument(help="Folder of a saved cache.", metavar="[BOOK.kvswap]")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Every saved cache in this folder.", metavar="DIR")
    ] = None,
    move_damaged: Annotated[
        bool, typer.Option("--move-damaged", help="Of a store: rename damaged ones to *.damaged.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read a saved cache, or all of a folder, whole and check every record."""
    import json

    from kvswap_torch.cli import saved

    if (book is None) == (store is None) or (move_damaged and store is None):
        raise typer.BadParameter(
            "name one saved cache, or --store DIR (and --move-damaged with it alone)"
        )
    console = Console(stderr=as_json)
    if store is not None:
        found = saved.verify_store(store, move_damaged, console)
        if as_json:
            Console().print_json(json.dumps(found))
        return saved.raise_for(found, store)
    saved.verify(book, console)
    if as_json:
        saved.show(book, True, Console())


def rm(book: Saved, as_json: Json = False) -> None:
    """Remove a saved cache that nobody uses."""
    from kvswap_torch.cli import saved

    saved.remove(book)
    if as_json:
        Console().print_json("{}")


def add_to(app: Any) -> None:
    """Makes commands of them."""
    for command in (ingest, ask, chat, show, verify, rm):
        app.command()(command)
