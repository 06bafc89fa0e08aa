"""``kvswap generate``: a long document answered from disk, with the full cache beside it."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvswap_torch.cli import report
from kvswap_torch.cli.document import document_text
from kvswap_torch.cli.load import (
    check_budget,
    check_saved_budget,
    load_model,
    load_tokenizer,
    weights_memory_of,
)
from kvswap_torch.cli.parallel import distributed_config, is_first, quiet_console
from kvswap_torch.cli.prompt import Prompt, check_text, make_prompt
from kvswap_torch.cli.reading import counted_by_layers, reading, waiting, waiting_for_weights
from kvswap_torch.cli.targets import check_directory, check_file, check_folder, check_settings
from kvswap_torch.errors import ConfigError
from kvswap_torch.few_bits import check_format
from kvswap_torch.memory_size import parse_bytes
from kvswap_torch.positions import REMEDY, most_positions
from kvswap_torch.saved_path import named
from kvswap_torch.timeline import SPANS

if TYPE_CHECKING:
    from kvswap_torch.cli.agreement import Agreement
    from kvswap_torch.cli.conversation import Conversation


@dataclass(frozen=True)
class GenerateOptions:
    """The command's options; see ``kvswap generate --help``."""

    model: str
    document: Path | None
    questions: tuple[str, ...]
    save: Path | None = None
    saved: Path | None = None
    config: Path | None = None
    preset: str | None = None
    keep: str | None = None
    rows: str | None = None
    heads: str | None = None
    kv_memory: str | None = None
    path: Path | None = None
    compare: bool = False
    json_out: Path | None = None
    timeline: Path | None = None
    max_new_tokens: int = 200
    dtype: str = "auto"
    device: str = "cpu"
    prefill_chunk: int = 4096
    prompt_template: str = "auto"
    weights: str | None = None
    weights_memory: str | None = None
    tensor_parallel: int = 1
    pipeline: int = 1


@dataclass(frozen=True)
class Material:
    """What both runs share, so that only the cache differs."""

    model: Any
    tokenizer: Any
    prompt: Prompt
    document_ids: list[int]


def run(options: GenerateOptions, console: Console) -> report.Result:
    """Runs the command; prints as it goes; returns what ``--json`` writes."""
    # All that can be refused is refused before a model is loaded.
    distributed = distributed_config(options.tensor_parallel, options.pipeline)
    console = quiet_console(console)
    kv_memory = None if options.kv_memory is None else parse_bytes(options.kv_memory, "--kv-memory")
    config = _load_config(options)
    keep = _keep(options.keep)
    check_questions(options)
    check_format(options.weights, options.device)
    weights_memory_of(options.weights_memory)
    check_directory("--path", options.path)
    _check_outputs(options)
    _check_saved(options)
    _check_save(options, config)
    material = _read_prompt(options, console)
    context = _context(options, material)
    _check_fits(options, material, config, kv_memory, context)
    material = _with_model(options, material, distributed, console)
    _check_context(context, material)
    arguments = {
        "path": _path(options, config),
        "kv_memory_bytes": kv_memory,
        "max_context": context,
        "max_batch": 1,
        "timeline_spans": SPANS if options.timeline is not None else 0,
    }

    from kvswap_torch import KVSwapCache

    began = time.perf_counter()
    if options.saved is None:
        opened = KVSwapCache(
            material.model, config=config, preset=options.preset, keep=keep, **arguments
        )
    else:
        opened = KVSwapCache.open(
            material.model, options.saved, input_ids=material.document_ids, **arguments
        )
    opening = time.perf_counter() - began
    with opened as cache:
        console.rule("KV cache on disk" if arguments["path"] else "KV cache that drops tokens")
        conversation, disk = _converse(options, material, cache, console, opening)
        disk.stats = report.plain_stats(cache.stats())
        _save_timeline(options, cache, console)
        console.print(report.closing_line(disk))
        memory, compared = None, None
        if options.compare:
            memory, compared = _compare(options, material, conversation, console)

    result = report.Result(
        model=options.model,
        document=str(options.document or options.saved),
        document_tokens=len(material.document_ids),
        disk=disk,
        memory=memory,
        agreements=compared,
    )
    if memory is not None:
        console.print(report.comparison(result))
    if options.json_out is not None and is_first():
        report.write_json(result, options.json_out)
    return result


def _compare(
    options: GenerateOptions, material: Material, on_disk: Conversation, console: Console
) -> tuple[report.Run, list[Agreement]]:
    """The same questions with the full cache, while the other stays open to be compared with."""
    from transformers import DynamicCache

    from kvswap_torch.cli.agreement import agreements

    console.rule("full KV cache in memory")
    full = DynamicCache(config=material.model.config)
    in_memory, memory = _converse(options, material, full, console)
    memory.stats = {"kv_bytes_full": report.tensor_bytes(full)}
    console.print(report.closing_line(memory))
    return memory, agreements(on_disk, in_memory, len(material.document_ids))


def _converse(
    options: GenerateOptions, material: Material, cache: Any, console: Console, opening: float = 0.0
) -> tuple[Conversation, report.Run]:
    """Reads the document, unless the cache has it and took `opening` seconds to open, and asks."""
    from kvswap_torch.cli.conversation import Conversation

    conversation = Conversation(material.model, material.tokenizer, cache, material.prompt)
    unread = [] if cache.get_seq_length() > 0 else material.document_ids
    asks_at_once = unread and getattr(getattr(cache, "driver", None), "path", "") is None
    if asks_at_once:  # what reads it last decides what is kept: the first question does
        conversation.ids.extend(unread)
        seconds = 0.0
    elif unread:
        seconds = _read(conversation, unread, options.prefill_chunk, console)
        if options.save is not None and hasattr(cache, "save"):
            save(cache, options.save, console)
    else:
        conversation.ids.extend(material.document_ids)
        seconds = opening
    for turn, question in enumerate(options.questions):
        console.print(f"\n[bold]> {report.escaped(question)}[/bold]")
        with contextlib.ExitStack() as until_it_answers:
            if asks_at_once and turn == 0:
                shown = reading(len(unread), console, material.model)
                advance = until_it_answers.enter_context(shown)
                until_it_answers.enter_context(counted_by_layers(material.model, advance))
            else:
                until_it_answers.enter_context(waiting_for_weights(material.model, console))

            def write(text: str, shown: contextlib.ExitStack = until_it_answers) -> None:
                shown.close()
                console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

            conversation.ask(question, options.max_new_tokens, write)
        console.print()
    gc.collect()
    if asks_at_once:
        seconds = conversation.turns[0].first_token_seconds
    return conversation, report.Run(
        prefill_tokens=len(unread),
        prefill_seconds=seconds,
        turns=conversation.turns,
    )


def save(cache: Any, folder: Path, console: Console, overwrite: bool = False) -> None:
    """Saves a cache and says how long that took."""
    began = time.perf_counter()
    cache.save(folder, overwrite=overwrite)
    seconds = time.perf_counter() - began
    console.print(f"saved to [bold]{report.escaped(str(folder))}[/bold] in {seconds:.2f} s")


def _read(conversation: Conversation, ids: list[int], chunk: int, console: Console) -> float:
    with reading(len(ids), console, conversation.model) as advance:
        return conversation.read(ids, chunk, advance)


def _context(options: GenerateOptions, material: Material) -> int:
    """The most tokens this run can come to: known now, so budget and disk are checked now."""
    asked = sum(
        len(material.prompt.question_ids(material.tokenizer, question, turn))
        for turn, question in enumerate(options.questions)
    )
    return len(material.document_ids) + asked + len(options.questions) * options.max_new_tokens


def _check_context(
    context: int,
    material: Material,
    what: str = "document, questions and answers",
    remedy: str = "shorten them, lower --max-new-tokens",
) -> None:
    """Refuses more tokens than the model was made for, unless its config scales its positions."""
    most = most_positions(material.model.config.get_text_config())
    if most is None or context <= most:
        return
    raise ConfigError(
        f"--document: {what} must be at most the {most:,} tokens that this model was made for, "
        f"come to {context:,}; {remedy}, or {REMEDY}"
    )


def _load_config(options: GenerateOptions) -> Any:
    from kvswap_torch.config import SwapConfig
    from kvswap_torch.config.engine import renamed
    from kvswap_torch.preset import find

    config = None if options.config is None else SwapConfig.load(options.config)
    said = {"rows": options.rows, "heads": options.heads}
    said = {name: word for name, word in said.items() if word is not None}
    if options.preset is not None:
        find(options.preset)
        for name in ("config", *said):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"--{name}: must be left out with --preset, which says it, got "
                    f"{getattr(options, name)}; SwapConfig.preset() takes other settings"
                )
    changes = dict(renamed(name, word) for name, word in said.items())
    return (config or SwapConfig()).with_settings(changes) if changes else config


def _path(options: GenerateOptions, config: Any) -> Path | None:
    """Where the cache is; none is needed for what drops tokens, unless it is saved."""
    from kvswap_torch.config import SwapConfig
    from kvswap_torch.keep import drops_for_good

    if options.path is not None:
        return options.path
    if options.preset is not None:
        config = SwapConfig.preset(options.preset)
    return None if drops_for_good(config) and options.save is None else Path(".")


def _keep(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError as error:
        raise ConfigError(
            f"--keep: must be a number of tokens or a share like 0.25, got {text!r}"
        ) from error


def _check_outputs(options: GenerateOptions) -> None:
    if options.compare and options.pipeline > 1:
        raise ConfigError(
            "--compare: must be left out with --pipeline, since transformers' cache in memory "
            "knows no lengths of layers that another process has, and later turns go wrong"
        )
    if options.json_out not in (None, report.STDOUT):
        check_file("--json", options.json_out)
    if options.timeline is not None:
        check_file("--timeline", options.timeline)


def check_questions(options: GenerateOptions) -> None:
    """That a tokenizer can read them."""
    for question in options.questions:
        check_text("--question", question)


def _check_save(options: GenerateOptions, config: Any) -> None:
    from kvswap_torch.config import SwapConfig

    if options.save is None:
        return
    if options.tensor_parallel * options.pipeline > 1:
        raise ConfigError(
            "--save: must be left out where several processes run a model, got "
            f"--tensor-parallel {options.tensor_parallel} --pipeline {options.pipeline}"
        )
    check_folder("--save", options.save)
    if options.preset is not None:
        settings, option = SwapConfig.preset(options.preset), f"--preset {options.preset}"
    else:
        settings, option = config or SwapConfig(), "--config"
    check_settings(option, settings, "leave --save out")


def _check_saved(options: GenerateOptions) -> None:
    if options.document is None and options.saved is None:
        raise ConfigError("--document: must be given, or --open with what was saved of one")
    if options.saved is None:
        return
    for name in ("config", "preset", "keep", "rows", "heads", "save"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name}: must be left out with --open, which goes on with the settings that "
                f"were saved, got {getattr(options, name)}"
            )


def _saved_ids(saved: Path) -> list[int]:
    """The tokens of a saved document."""
    from kvswap_torch import _C

    ids = _C.SavedCache(named(saved)).tensors().get("token_ids")
    if ids is None or len(ids) != 1:
        raise ConfigError(f"--open: {saved} must hold one document's tokens, and does not")
    return ids[0].tolist()


def _save_timeline(options: GenerateOptions, cache: Any, console: Console) -> None:
    if options.timeline is None or not is_first():
        return
    timeline = cache.stats(timeline=True).timeline
    timeline.save(options.timeline)
    console.print(f"\n[bold]{options.timeline}[/bold] opens at https://ui.perfetto.dev")
    console.print(str(timeline), markup=False, highlight=False)


def _read_prompt(options: GenerateOptions, console: Console) -> Material:
    """All but the model."""
    text = None if options.document is None else document_text(options.document)
    saved_ids = None if options.saved is None else _saved_ids(options.saved)
    tokenizer = load_tokenizer(options.model)
    prompt = make_prompt(options.prompt_template, tokenizer)
    if options.prompt_template == "auto" and not getattr(tokenizer, "chat_template", None):
        console.print("[dim]no chat template in this model's folder: asked in plain words[/dim]")
    ids = saved_ids if text is None else prompt.prefix_ids(tokenizer, text)
    if not ids:
        raise ConfigError(f"--document: must not be empty, got {options.document}")
    if saved_ids is not None and len(ids) != len(saved_ids):
        raise ConfigError(
            f"--document: must be what was saved in {options.saved}, of {len(saved_ids):,} tokens, "
            f"got {len(ids):,}"
        )
    return Material(None, tokenizer, prompt, ids)


def _with_model(
    options: GenerateOptions, material: Material, distributed: Any, console: Console
) -> Material:
    with waiting("loading the model", console):
        model = load_model(
            options.model,
            options.dtype,
            options.device,
            say=lambda told: console.print(f"[dim]{told}[/dim]"),
            distributed=distributed,
            weights=options.weights,
            weights_memory=weights_memory_of(options.weights_memory),
            folder=options.path,
        )
    return replace(material, model=model)


def _check_fits(
    options: GenerateOptions, material: Material, config: Any, kv_memory: int | None, context: int
) -> None:
    """Refuses a budget that is too small before the model is loaded.

    On a device, and where several processes share the model, the cache itself does so.
    """
    if options.device != "cpu" or options.tensor_parallel * options.pipeline > 1:
        return
    if options.saved is not None:
        check_saved_budget(options.saved, kv_memory, context)
        return
    check_budget(
        options.model,
        options.dtype,
        options.weights,
        path=_path(options, config),
        config=config,
        preset=options.preset,
        keep=_keep(options.keep),
        kv_memory_bytes=kv_memory,
        max_context=context,
        max_batch=1,
        timeline_spans=SPANS if options.timeline is not None else 0,
    )
