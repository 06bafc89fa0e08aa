"""The server's page, and what it asks beside OpenAI's API: documents, and reading one.

The files themselves say nothing of what is served; what they ask needs a key, as all else does.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.bodies import parsed
from kvswap_torch.hf.serving.fields import checked, kind
from kvswap_torch.hf.serving.limits import Limits
from kvswap_torch.hf.serving.line import Turn
from kvswap_torch.hf.serving.refusal import RefusedError, error_reply, shown
from kvswap_torch.hf.serving.store import CacheStore, Entry

INGEST = "/v1/kvswap/ingest"
DOCUMENTS = "/v1/kvswap/documents"
BEGINS_TOKENS, BEGINS_CHARACTERS = 160, 60  # of a document's text, in the list
FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
_LETTER = re.compile(r"\w")
_KINDS = {".html": b"text/html; charset=utf-8", ".css": b"text/css", ".js": b"text/javascript"}
_FOLDER = Path(__file__).parent / "static"
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


def file_of(path: str) -> tuple[str, bytes]:
    """A file's text, and its content type."""
    file = _FOLDER / FILES[path]
    return file.read_text(encoding="utf-8"), _KINDS[file.suffix]


def read_document(body: bytes, bounds: Limits) -> Asked:
    """What ``POST /v1/kvswap/ingest`` asks: a text to be read and saved.

    Raises
    ------
    RefusedError
        It is nothing of that kind.
    """
    must = 'the body must be {"text": the document}'
    given = parsed(body, must, bounds.values)
    if not isinstance(given, dict):
        raise RefusedError(400, f"{must}, got {type(given).__name__}")
    text = checked(given, {"text": kind(str, "a text")}).get("text")
    if not text:
        raise RefusedError(400, must)
    return Asked(INGEST, prompt=text, is_streamed=True)


class Documents:
    """Saved caches as documents: what they say, and how one more is read.

    A document stands where a chat's first message has it, as ``kvswap ingest`` puts it, so that a
    question about it, put behind two line ends, goes on from it.
    """

    def __init__(self, store: CacheStore, tokenizer: Any) -> None:
        self._store, self._tokenizer = store, tokenizer
        self._opening = _opening(tokenizer)

    def listed(self, owner: str) -> dict[str, Any]:
        """The newest first, and whose words a chat has them as.

        ``document`` is the file's name where the saved cache has it, else empty; ``begins`` is how
        the text begins.
        """
        entries = sorted(self._store.entries(owner), key=lambda entry: -entry.used_ns)
        documents = [
            {
                "name": entry.path.name,
                "document": entry.document,
                "begins": beginning(self._text(entry, BEGINS_TOKENS)),
                "tokens": len(entry.tokens),
                "bytes": entry.bytes,
                "used": entry.used_ns / 1e9,
            }
            for entry in entries
        ]
        return {"documents": documents, "said_by": "system" if self._opening is None else "user"}

    def text(self, owner: str, path: str) -> dict[str, str]:
        """Of one of them.

        Raises
        ------
        RefusedError
            There is none of that name.
        """
        name = unquote(path.removeprefix(f"{DOCUMENTS}/"))
        for entry in self._store.entries(owner):
            if entry.path.name == name:
                return {"name": name, "text": self._text(entry)}
        raise RefusedError(404, f"there is no document {shown(name)}")

    def ids(self, text: str) -> torch.Tensor:
        """``[1, tokens]`` that a document is read as."""
        ids = self._tokenizer(
            (self._opening or "") + text, add_special_tokens=self._opening is None
        )["input_ids"]
        if self._opening is None and ids[-1:] == [self._tokenizer.eos_token_id]:
            ids = ids[:-1]  # it would end the text before the question
        return torch.tensor([ids], dtype=torch.int64)

    def name_of(self, ids: torch.Tensor, owner: str) -> str | None:
        """The saved cache that begins with all of these tokens."""
        wanted = ids[0].to(torch.int32)
        for entry in self._store.entries(owner):
            begin = entry.tokens[: len(wanted)]
            if len(begin) == len(wanted) and bool((begin == wanted).all()):
                return entry.path.name
        return None

    def _text(self, entry: Entry, most: int | None = None) -> str:
        """Of all tokens, or of the first `most`."""
        text = self._tokenizer.decode(entry.tokens[:most].tolist(), skip_special_tokens=False)
        if self._opening is None:
            text = text.removeprefix(self._tokenizer.bos_token or "")
        return text.removeprefix(self._opening or "")


def beginning(text: str) -> str:
    """Its first words in one line, without rules and bullets; cut between words if it has any."""
    words = text.rstrip("\ufffd").split()  # a character that the last token begins
    line = " ".join(filter(_LETTER.search, words)) or " ".join(words)
    if len(line) <= BEGINS_CHARACTERS:
        return line
    cut = line[:BEGINS_CHARACTERS]
    whole = cut if line[BEGINS_CHARACTERS] == " " else cut.rpartition(" ")[0]
    return f"{whole or cut} ..."


def _opening(tokenizer: Any) -> str | None:
    """What a chat's template writes before its first message; None: there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    mark = "@kvswap-document@"
    messages = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opening, found, _ = text.partition(mark)
    return opening if found else ""


async def ingested(
    documents: Documents, read: Any, ids: torch.Tensor, turn: Turn
) -> AsyncIterator[str]:
    """A document is read: an event for each step of it, and one at its end.

    read: `read(progress)`: a future of it, which calls `progress(tokens)` from any thread.
    """
    loop, steps = asyncio.get_running_loop(), asyncio.Queue[int]()
    began, total = time.monotonic(), ids.shape[1]

    def progress(tokens: int) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, tokens)

    running = asyncio.ensure_future(read(progress))
    said = -1
    try:
        while not running.done() or not steps.empty():
            step = asyncio.ensure_future(steps.get())
            await asyncio.wait({step, running}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                step.cancel()
                continue
            if 100 * step.result() // total > said:
                said = 100 * step.result() // total
                yield _event({"read": step.result(), "of": total})
        if (error := running.exception()) is not None:
            yield _event(error_reply(str(error)))
            return
        yield _event(
            {
                "read": total,
                "of": total,
                "cached": turn.cached_tokens,
                "seconds": round(time.monotonic() - began, 2),
                "name": documents.name_of(ids, turn.owner),
            }
        )
    finally:
        running.cancel()


def _event(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said)}\n\n"
