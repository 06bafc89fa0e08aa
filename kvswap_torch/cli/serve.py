"""``kvswap serve``: its options, and the model that it loads."""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from kvswap_torch.cli.load import (
    check_budget,
    device_of,
    load_config,
    load_model,
    load_tokenizer,
    weights_memory_of,
)
from kvswap_torch.cli.reading import waiting
from kvswap_torch.cli.saved_app import Preset, Weights, WeightsMemory
from kvswap_torch.cli.serve_log import LogFormat, log_to_stderr
from kvswap_torch.cli.targets import check_directory, check_settings
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import ConfigError
from kvswap_torch.few_bits import check_format
from kvswap_torch.keep import drops
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.process_memory import keep_little_code

if TYPE_CHECKING:
    from kvswap_torch.hf.serving.server import Server

HELP = """\
Serve a model over OpenAI's API, on this machine; documents are read once.

Chat completions, completions and responses, streamed or not, by transformers' own server. A \
request goes on from the cache that has read most of its tokens already; what is new is saved in \
--store after the answer, and found again after a restart. kvswap ingest -o STORE/book.kvswap puts \
a document there beforehand; kvswap show, verify and rm work on what is there.

  kvswap serve --model DIR --store /disk/kv --store-limit 50GiB --kv-memory 512MiB

Each API key has caches of its own. With --shared-store, and without keys, \
[bold]one store is one circle of trust[/bold]: who may ask can find out, by what was in a cache, \
what others have asked. Who can read the folder has all texts.

SIGTERM, or Ctrl-C, ends the running answer with its step, saves what was read and ends.
"""

KEY_FILE_BYTES_MAX = 1 << 20
_KEY = re.compile(r"[!-~]+")  # what a header's value can carry
FOLDER = "a model's folder"


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder of a Hugging Face model.", metavar="DIR")],
    store: Annotated[Path, typer.Option(help="Folder of the saved caches.", metavar="DIR")],
    store_limit: Annotated[
        str, typer.Option(help="Most disk space for them; the oldest leave.", metavar="50GiB")
    ] = "10GiB",
    kv_memory: Annotated[
        str | None, typer.Option(help="Most memory the KV cache may take.", metavar="512MiB")
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(min=16, help="Longest prompt and answer; else the model's.", metavar="N"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="What the tuner wrote.", metavar="config.json")
    ] = None,
    preset: Preset = None,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk for new records; else the store.", metavar="DIR"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model; else its folder's name.")
    ] = None,
    save_from: Annotated[
        int, typer.Option(min=1, help="Save what has this many new tokens.", metavar="N")
    ] = 1024,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more get 503.", metavar="N")
    ] = 64,
    host: Annotated[
        str, typer.Option(help="Other than this machine's own: needs --api-key-file.")
    ] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="API keys, one a line; # begins a comment.", metavar="FILE")
    ] = None,
    shared_store: Annotated[
        bool, typer.Option("--shared-store", help="All keys use one another's caches.")
    ] = False,
    answer_seconds: Annotated[
        float, typer.Option(min=1, help="Longest time for an answer, its prompt read.", metavar="S")
    ] = 3600.0,
    device: Annotated[str, typer.Option(help="Where the model is: cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of weights and KV.")
    ] = "auto",
    weights: Weights = None,
    weights_memory: WeightsMemory = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=64, help="Tokens of a prompt per forward pass.", metavar="N")
    ] = 4096,
    log_format: Annotated[
        LogFormat, typer.Option(help="Of the log on standard error, a line for each request.")
    ] = "text",
    no_page: Annotated[
        bool, typer.Option("--no-page", help="No page at the server's address.")
    ] = False,
    continuous_batching: Annotated[bool, typer.Option(hidden=True)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print address and model as JSON when it is ready.")
    ] = False,
) -> None:
    if continuous_batching:
        raise ConfigError(
            "--continuous-batching: must be left out: it keeps a paged cache of its own in memory, "
            "and has no place for another"
        )
    context.with_resource(log_to_stderr(log_format))
    _check_settings(config, preset)
    check_directory("--path", path)
    limit = parse_bytes(store_limit, "--store-limit")
    if kv_memory is not None:
        parse_bytes(kv_memory, "--kv-memory")
    check_format(weights, device)
    weights_bytes = weights_memory_of(weights_memory)
    keys = _keys(api_key_file, shared_store)
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)

    from transformers.utils import logging as hf_logging

    from kvswap_torch.hf.serving.reuse import CacheOptions
    from kvswap_torch.hf.serving.server import Server, ServerOptions

    hf_logging.set_verbosity_error()  # the server warns of every request
    keep_little_code()
    if device_of(device).type == "cpu":
        _check_fits(
            model, (dtype, weights), kv_memory, path=path or store, config=config, preset=preset,
            max_context=max_context,
        )  # fmt: skip
    tokenizer = load_tokenizer(model, wanted=FOLDER)
    with waiting("loading the model", console):
        loaded = load_model(
            model, dtype, device, say=console.print, wanted=FOLDER, weights=weights,
            weights_memory=weights_bytes, folder=path or store,
        )  # fmt: skip
    server = Server(
        loaded,
        tokenizer,
        ServerOptions(
            name=name or Path(model).resolve().name,
            store=store,
            store_limit_bytes=limit,
            host=host,
            port=port,
            keys=keys,
            shares_store=shared_store,
            queue=queue,
            answer_seconds=answer_seconds,
            has_page=not no_page,
        ),
        CacheOptions(
            path=path or store,
            config=config,
            preset=preset,
            kv_memory_bytes=kv_memory,
            max_context=max_context,
            save_from=save_from,
            prefill_chunk=prefill_chunk,
        ),
    )
    _run(server, console, as_json, has_page=not no_page)


def _check_fits(
    model: str,
    formats: tuple[str, str | None],
    kv_memory: str | None,
    *,
    max_context: int | None,
    **arguments: Any,
) -> None:
    """Refuses a budget that is too small for the longest context before the model is loaded."""
    if kv_memory is None:
        return
    text = load_config(model).get_text_config()
    check_budget(
        model,
        *formats,
        **arguments,
        kv_memory_bytes=kv_memory,
        max_context=max_context or getattr(text, "max_position_embeddings", None),
        max_batch=1,
    )


def _check_settings(config: Path | None, preset: str | None) -> None:
    """That caches of such settings can be saved, and asked from their documents' ends."""
    why = "a server saves its caches"
    if preset is None:
        check_settings("--config", SwapConfig() if config is None else SwapConfig.load(config), why)
        return
    settings = SwapConfig.preset(preset)
    if config is not None:
        raise ConfigError(f"--config: must be left out with --preset, which says it, got {config}")
    check_settings(f"--preset {preset}", settings, why)
    if drops(settings):
        raise ConfigError(
            f"--preset: must be one that drops no tokens, since other questions about a document "
            f"need others of them, got {preset}; kvswap presets lists them"
        )


def _run(server: Server, console: Console, as_json: bool, has_page: bool) -> None:
    """Says where it is, and answers until it is ended."""
    shown = {
        "address": server.address,
        "model": server.app.name,
        "saved_caches": server.store.usable,
    }

    def started() -> None:
        if as_json:
            Console().print_json(data=shown, indent=None)
            return
        console.print("{model} at {address}/v1, {saved_caches} saved caches".format(**shown))
        if has_page:
            console.print(f"a page to ask and look at: {server.address}/")

    server.run(started)
    if server.is_reading:  # the end of the process would wait for it
        logging.shutdown()
        os._exit(0)


def _keys(path: Path | None, is_shared: bool) -> tuple[str, ...]:
    keys = read_keys(path)
    if is_shared and not keys:
        raise ConfigError("--shared-store: must have keys (--api-key-file) that share it")
    if path is not None and (told := readers_of(path)):
        logging.getLogger(__name__).warning(told)
    return keys


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of a file: one a line; what follows a # is a comment.

    Raises
    ------
    ConfigError
        It cannot be read, has none, or one that no header can carry.
    """
    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            text = file.read(KEY_FILE_BYTES_MAX + 1).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: must be a text file: {error}") from error
    if len(text) > KEY_FILE_BYTES_MAX:
        raise ConfigError(f"--api-key-file: must have at most {KEY_FILE_BYTES_MAX} bytes: {path}")
    keys = []
    for number, line in enumerate(text.split("\n"), 1):
        key = re.sub(r"(^|\s)#.*", "", line).strip()
        if key and not _KEY.fullmatch(key):
            raise ConfigError(
                f"--api-key-file: line {number} of {path} must be one key of printable ASCII "
                "without blanks"
            )
        keys += [key] if key else []
    if not keys:
        raise ConfigError(f"--api-key-file: must have a key, and {path} has none")
    return tuple(dict.fromkeys(keys))


def readers_of(path: Path) -> str:
    """Who else can read a file of keys, in words; empty: nobody."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        return f"--api-key-file: {path} can be read by others than its owner: chmod go= it"
    return ""
