"""``kvswap ingest``, ``ask``, ``show``, ``verify`` and ``rm``: a document's cache in a folder."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvswap_torch.cli.generate import (
    GenerateOptions,
    Material,
    _check_context,
    _load_config,
    _read,
    _read_prompt,
    _with_model,
    check_questions,
    save,
)
from kvswap_torch.cli.load import (
    check_budget,
    check_saved_budget,
    load_model,
    load_tokenizer,
    weights_memory_of,
)
from kvswap_torch.cli.prompt import make_prompt
from kvswap_torch.cli.reading import until_it_writes, waiting
from kvswap_torch.cli.report import escaped
from kvswap_torch.cli.targets import check_directory, check_folder, check_settings
from kvswap_torch.config import SwapConfig, v1
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import ConfigError, CorruptionError, KVSwapError
from kvswap_torch.memory_size import format_bytes, parse_bytes
from kvswap_torch.saved_path import named
from kvswap_torch.saved_scrub import check_all, read_whole

if TYPE_CHECKING:
    from kvswap_torch.cli.conversation import Conversation


def ingest(options: GenerateOptions, output: Path, overwrite: bool, console: Console) -> None:
    """Reads a document once and saves its cache."""
    config = _load_config(options)
    check_directory("--path", options.path)
    if options.kv_memory is not None:
        parse_bytes(options.kv_memory, "--kv-memory")
    weights_memory_of(options.weights_memory)
    check_folder("--output", output, overwrite)
    chosen = config if options.preset is None else SwapConfig.preset(options.preset)
    said = "--config" if options.preset is None else "--preset"
    check_settings(said, chosen or SwapConfig(), "ingest saves its cache")
    material = _read_prompt(options, console)

    from kvswap_torch import KVSwapCache
    from kvswap_torch.cli.conversation import Conversation
    from kvswap_torch.hf.settings import FirstPass

    arguments = {
        "path": options.path,
        "config": config,
        "preset": options.preset,
        "kv_memory_bytes": options.kv_memory,
        "max_context": FirstPass(1, len(material.document_ids)).context,  # questions come too
        "max_batch": 1,
    }
    check_budget(options.model, options.dtype, options.weights, **arguments)
    material = _with_model(options, material, None, console)
    _check_context(len(material.document_ids), material, "its tokens", "shorten it")
    with KVSwapCache(material.model, **arguments) as cache:
        conversation = Conversation(material.model, material.tokenizer, cache, material.prompt)
        cache.document = "" if options.document is None else str(options.document)
        read = _read(conversation, material.document_ids, options.prefill_chunk, console)
        console.print(f"{len(material.document_ids):,} tokens read in {read:.1f} s")
        save(cache, output, console, overwrite)


@contextlib.contextmanager
def opened(
    saved: Path, model: str | None, options: GenerateOptions, console: Console
) -> Iterator[Conversation]:
    """A conversation over a saved document, at its end."""
    check_directory("--path", options.path)
    with _at_its_end(saved, _load_for(saved, model, options, console), options, console) as begun:
        yield begun


def _load_for(
    saved: Path, model: str | None, options: GenerateOptions, console: Console
) -> Material:
    """A saved document's model, in the precision that it was saved in, and tokenizer."""
    facts = facts_of(saved)["facts"]
    check_saved_budget(saved, options.kv_memory)
    weights_memory = weights_memory_of(options.weights_memory)
    model = model or facts.get("name") or ""
    wanted = f"the model that {saved} was made by"
    tokenizer = load_tokenizer(model, wanted=wanted)
    with waiting("loading the model", console):
        loaded = load_model(
            model,
            facts.get("model", {}).get("dtype", options.dtype),
            options.device,
            say=lambda told: console.print(f"[dim]{told}[/dim]"),
            wanted=wanted,
            weights=options.weights or facts.get("weights_format"),
            weights_memory=weights_memory,
            folder=options.path,
        )
    return Material(loaded, tokenizer, make_prompt(options.prompt_template, tokenizer), [])


@contextlib.contextmanager
def _at_its_end(
    saved: Path, material: Material, options: GenerateOptions, console: Console
) -> Iterator[Conversation]:
    from kvswap_torch import KVSwapCache
    from kvswap_torch.cli.conversation import Conversation

    began = time.perf_counter()
    with KVSwapCache.open(
        material.model, saved, path=options.path, kv_memory_bytes=options.kv_memory
    ) as cache:
        ids = cache.token_ids
        if ids is None or len(ids) != 1:
            raise ConfigError(f"ask: {saved} must hold one document's tokens, and does not")
        conversation = Conversation(material.model, material.tokenizer, cache, material.prompt)
        conversation.ids = ids[0].tolist()
        seconds = time.perf_counter() - began
        console.print(f"[dim]{ids.shape[1]:,} tokens opened in {seconds:.2f} s[/dim]")
        yield conversation


def ask(
    saved: Path, model: str | None, options: GenerateOptions, console: Console
) -> list[dict[str, Any]]:
    """Asks a saved document; each question begins at the document's end.

    Where a model's layers cannot go back there, the document is opened anew.
    """
    from kvswap_torch.cli.conversation import CannotGoBackError

    check_questions(options)
    check_directory("--path", options.path)
    material = _load_for(saved, model, options, console)
    answers: list[dict[str, Any]] = []
    while len(answers) < len(options.questions):
        with _at_its_end(saved, material, options, console) as conversation:
            document = len(conversation.ids)
            for question in options.questions[len(answers) :]:
                try:
                    conversation.go_back(document, 0)
                except CannotGoBackError:
                    break
                console.print(f"\n[bold]> {escaped(question)}[/bold]")
                with until_it_writes(conversation.model, console, writer(console)) as write:
                    turn = conversation.ask(question, options.max_new_tokens, write)
                console.print()
                answers.append({"question": question, "answer": turn.answer,
                                "first_token_seconds": turn.first_token_seconds})  # fmt: skip
    return answers


def writer(console: Console) -> Callable[[str], None]:
    """Prints an answer's pieces as they come."""
    return lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def facts_of(saved: Path) -> dict[str, Any]:
    """What a saved cache's manifest says, checked."""
    from kvswap_torch import _C
    from kvswap_torch.hf.saved_facts import check_facts

    manifest = json.loads(_C.SavedCache(named(saved)).manifest)
    if manifest["facts"]:  # none of a C++ program's
        check_facts(manifest["facts"], str(saved))
    return manifest


def show(saved: Path, as_json: bool, console: Console) -> None:
    """Prints what a saved cache holds."""
    manifest = facts_of(saved)
    if as_json:
        console.print_json(json.dumps(manifest))
        return
    model = manifest["facts"].get("model", {})
    sizes = manifest["records_bytes"] + manifest["state_bytes"]
    facts = manifest["facts"]
    when = datetime.datetime.fromtimestamp((Path(named(saved)) / "manifest.json").stat().st_mtime)
    rows = {
        "document": facts.get("document") or "not said",
        "saved": f"{when:%Y-%m-%d %H:%M}",
        "tokens": f"{manifest['tokens']:,} x {manifest['sequences']}",
        "model": f"{model.get('model_type', '?')}, {model.get('layers', '?')} layers on disk",
        "on disk": format_bytes(sizes),
        "in memory when opened, at least": format_bytes(manifest["state_bytes"]),
        "settings": _told_settings(manifest["settings"]),
    }
    for name, value in rows.items():
        console.print(f"{name:32} {value}", highlight=False, soft_wrap=True)


def _told_settings(settings: dict[str, Any]) -> str:
    """Single ones that are not the defaults, in the words of the manifest's version."""
    named, usual = settings, v1.DEFAULTS
    if any(isinstance(value, dict) for value in settings.values()):
        usual = settings_of(SwapConfig())
        named = {
            f"{block}.{name}": value
            for block, fields in settings.items()
            for name, value in (fields or {}).items()
        }
    told = [
        f"{name}={value}"
        for name, value in named.items()
        if not isinstance(value, list | None) and value != usual.get(name)
    ]
    return ", ".join(told) or "the defaults"


def verify(saved: Path, console: Console) -> None:
    """Reads every byte of a saved cache and checks it."""
    with waiting("reading every byte", console):
        tokens = read_whole(saved)
    console.print(f"{escaped(str(saved))}: whole, {tokens:,} tokens")


def verify_store(store: Path, move: bool, console: Console) -> list[dict[str, Any]]:
    """Reads every saved cache in a folder; says which are damaged, and where they stand now."""
    found = []
    for each in check_all(store, move):
        name = escaped(str(each.path))
        if each.failure is None:
            console.print(f"{name}: whole, {each.tokens:,} tokens")
        else:
            moved = f"; moved to {escaped(str(each.moved_to))}" if each.moved_to else ""
            console.print(f"{name}: {each.failure}: {escaped(each.error)}{moved}")
        found.append(
            {
                "path": str(each.path),
                "tokens": each.tokens,
                "failure": each.failure,
                "error": each.error,
                "moved_to": None if each.moved_to is None else str(each.moved_to),
            }
        )
    return found


def raise_for(found: list[dict[str, Any]], store: Path) -> None:
    """An error where one of them is not whole."""
    wrong = [each for each in found if each["failure"] is not None]
    if not wrong:
        return
    told = f"verify: {len(wrong)} of {len(found)} saved caches in {store} are not whole, or could "
    told += "not be read: " + ", ".join(Path(each["path"]).name for each in wrong)
    is_damage = any(each["failure"] == "damage" for each in wrong)
    raise CorruptionError(told) if is_damage else KVSwapError(told)


def remove(saved: Path) -> None:
    """Removes a saved cache that nobody uses."""
    from kvswap_torch import _C

    _C.SavedCache.remove(named(saved))
