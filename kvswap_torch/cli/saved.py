"""``kvswap ingest``, ``ask``, ``show``, ``verify`` and ``rm``: a document's cache in a folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvswap_torch.cli.generate import GenerateOptions, _load, _load_config, _read, save
from kvswap_torch.cli.load import load_model, load_tokenizer
from kvswap_torch.cli.prompt import make_prompt
from kvswap_torch.cli.report import escaped
from kvswap_torch.errors import ConfigError
from kvswap_torch.memory_size import format_bytes

if TYPE_CHECKING:
    from kvswap_torch.cli.conversation import Conversation


def ingest(options: GenerateOptions, output: Path, overwrite: bool, console: Console) -> None:
    """Reads a document once and saves its cache."""
    config = _load_config(options)
    material = _load(options, None, console)

    from kvswap_torch import KVSwapCache
    from kvswap_torch.cli.conversation import Conversation

    with KVSwapCache(
        material.model, path=options.path, config=config, kv_memory_bytes=options.kv_memory
    ) as cache:
        conversation = Conversation(material.model, material.tokenizer, cache, material.prompt)
        read = _read(conversation, material.document_ids, options.prefill_chunk, console)
        console.print(f"{len(material.document_ids):,} tokens read in {read:.1f} s")
        save(cache, output, console, overwrite)


@contextlib.contextmanager
def opened(
    saved: Path, model: str | None, options: GenerateOptions, console: Console
) -> Iterator[Conversation]:
    """A conversation over a saved document, at its end."""
    from kvswap_torch import KVSwapCache
    from kvswap_torch.cli.conversation import Conversation

    model = model or facts_of(saved)["facts"].get("name") or ""
    wanted = f"the model that {saved} was made by"
    tokenizer = load_tokenizer(model, wanted=wanted)
    loaded = load_model(
        model,
        options.dtype,
        options.device,
        say=lambda told: console.print(f"[dim]{told}[/dim]"),
        wanted=wanted,
    )
    prompt = make_prompt(options.prompt_template, tokenizer)
    began = time.perf_counter()
    with KVSwapCache.open(
        loaded, saved, path=options.path, kv_memory_bytes=options.kv_memory
    ) as cache:
        ids = cache.token_ids
        if ids is None or len(ids) != 1:
            raise ConfigError(f"ask: {saved} must hold one document's tokens, and does not")
        conversation = Conversation(loaded, tokenizer, cache, prompt)
        conversation.ids = ids[0].tolist()
        seconds = time.perf_counter() - began
        console.print(f"[dim]{ids.shape[1]:,} tokens opened in {seconds:.2f} s[/dim]")
        yield conversation


def ask(
    saved: Path, model: str | None, options: GenerateOptions, console: Console
) -> list[dict[str, Any]]:
    """Asks a saved document; each question begins at the document's end."""
    answers = []
    with opened(saved, model, options, console) as conversation:
        document = len(conversation.ids)
        for question in options.questions:
            conversation.go_back(document, 0)
            console.print(f"\n[bold]> {escaped(question)}[/bold]")
            turn = conversation.ask(question, options.max_new_tokens, writer(console))
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

    return json.loads(_C.SavedCache(str(saved)).manifest)


def show(saved: Path, as_json: bool, console: Console) -> None:
    """Prints what a saved cache holds."""
    manifest = facts_of(saved)
    if as_json:
        console.print_json(json.dumps(manifest))
        return
    model = manifest["facts"].get("model", {})
    sizes = manifest["records_bytes"] + manifest["state_bytes"]
    rows = {
        "tokens": f"{manifest['tokens']:,} x {manifest['sequences']}",
        "model": f"{model.get('model_type', '?')}, {model.get('layers', '?')} layers on disk",
        "on disk": format_bytes(sizes),
        "in memory when opened, at least": format_bytes(manifest["state_bytes"]),
    }
    for name, value in rows.items():
        console.print(f"{name:32} {value}", highlight=False)


def verify(saved: Path, console: Console) -> None:
    """Reads every byte of a saved cache and checks it."""
    from kvswap_torch import _C

    folder = _C.SavedCache(str(saved))
    folder.verify()
    console.print(f"{escaped(str(saved))}: whole, {folder.tokens:,} tokens")


def remove(saved: Path) -> None:
    """Removes a saved cache that nobody uses."""
    from kvswap_torch import _C

    _C.SavedCache.remove(str(saved))
